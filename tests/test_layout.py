"""The tree is what the documentation says it is."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def test_operator_never_shadows_the_standard_module() -> None:
    """With an `__init__.py` there, Python could not import `collections` from the repository's root."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_every_package_is_built_and_typed() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {str(p.parent.relative_to(ROOT)) for p in ROOT.glob("*/*/py.typed") if ".venv" not in p.parts}
    assert packages == set(build["packages"])
    assert {p.split("/")[0] for p in packages} == set(build["dev-mode-dirs"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_architecture_page_names_functions_that_exist() -> None:
    """Its walk from borrow to reclaimed is only worth something while every step can be found."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text[text.index("## From `borrow`") : text.index("## The gate protocol")]
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", walk))
    assert len(named) > 10
    source = {p: p.read_text() for p in ROOT.glob("*/ema*/**/*.py")}
    for owner, name in sorted(named):
        found = [p for p, t in source.items() if re.search(rf"class {owner}\b", t) and re.search(rf"def {name}\(", t)]
        assert found, f"{owner}.{name}"
