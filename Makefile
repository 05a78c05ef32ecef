# Two commands: `make demo` shows it, `make test` proves it. Each sets up what it needs in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-torch lint bench bench-gpu clean gpu

$(VENV)/base: pyproject.toml
	@echo "== installing ema into $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: PYTHON is $(PYTHON); expected Python 3.11 or newer, as in: make PYTHON=python3.12 demo" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/dev: $(VENV)/base
	@echo "== installing what the tests need"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/base
	@echo "== ema demo: one trace, three runs (static partition, borrowing, twice the memory)"
	@$(BIN)/ema demo

lint: $(VENV)/dev
	@echo "== ruff, mypy --strict, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache

test: lint
	@echo "== pytest"
	@$(BIN)/pytest

# What needs torch: some GB to install, so apart from `make test`. No GPU needed.
test-torch: $(VENV)/dev
	@echo "== installing torch and transformers (minutes, once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[torch,dev]'
	@$(BIN)/pytest tests/models

# On a machine with an NVIDIA GPU: the contract suite and the agent on it. A hang in the driver ends the run and shows where.
gpu: $(VENV)/dev
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[cuda,dev]'
	@$(BIN)/pytest -m gpu tests/driver tests/gpu --timeout=60 --timeout-method=thread -o junit_family=xunit1

bench: $(VENV)/dev
	@for script in plan sim steps reclaim replay memory; do echo "== bench/$$script.py"; $(BIN)/python bench/$$script.py || exit 1; done

# On a machine with an NVIDIA GPU and torch: each prints its bound and its rivals.
bench-gpu: $(VENV)/dev
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[cuda,torch,dev]' accelerate
	@for script in driver streaming serving training cache gpu_reclaim lender; do echo "== bench/$$script.py"; $(BIN)/python bench/$$script.py; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
