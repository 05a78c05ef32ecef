"""The page of results says what the results say."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def record() -> ModuleType:
    return _of_bench("record")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return _of_bench("report")


def _of_bench(name: str) -> ModuleType:
    # Benchmarks are scripts that find each other beside themselves; their folder is on the path no longer than needed.
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


def test_the_page_is_what_the_kept_results_say(report: ModuleType) -> None:
    assert report.PAGE.read_text("utf-8") == report.page(report.kept()), "run `python bench/report.py`"
    readme = report.README.read_text("utf-8")
    assert readme == report.readme(readme, report.kept()), "run `python bench/report.py`"
    assert all(
        figure in {r.figure for r in record.rows}
        for record in report.kept()
        for figure in report.HEADLINES.get(record.name, ())
    )


def test_every_kept_file_bears_its_benchmark_name(record: ModuleType) -> None:
    names = {path.stem: record.read(path).name for path in record.RESULTS.glob("*.json")}
    assert names
    assert all(stem == name for stem, name in names.items())


def test_a_missed_goal_is_shown_and_fails_the_run(record: ModuleType, report: ModuleType) -> None:
    rows = [record.at_most(2.0, "time", 3.0, "ms"), record.at_least(0.95, "share", 0.96, ""), record.plain("n", 1, "")]
    made = record.record("x", "An example", rows)
    assert [row.ok for row in rows] == [False, True, None]
    assert not made.ok
    assert "| time | 3 ms | ≤ 2 | **no** |" in report.page([made])


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (75, 3), (99, 4), (0, 1)])
def test_percentiles_are_values_that_were_seen(record: ModuleType, percent: float, value: float) -> None:
    assert record.percentile([4, 1, 3, 2], percent) == value
