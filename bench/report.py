"""`docs/performance.md`, made from the kept results and never by hand.

    python bench/report.py [--check]

`--check` writes nothing and fails if the page is not what the results say.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from record import RESULTS, Record, Row, read

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
HEAD = """# Performance

What was measured, beside what was aimed at. Each table is one benchmark of `bench/`; run it again with
`python bench/NAME.py`, then make this page with `python bench/report.py`. GPUs are simulated unless a table says
otherwise; times are then those of this software and not of a link or a driver.
"""


def page(records: Iterable[Record]) -> str:
    """The page for these records, in the order of their names."""
    return "\n".join([HEAD, *(_table(r) for r in sorted(records, key=lambda r: r.name))])


def _table(record: Record) -> str:
    versions = [f"{name} {number}" for name, number in record.versions.items()]
    lines = [
        f"## {record.name}",
        "",
        f"{record.what}. {', '.join([record.machine, f'Python {record.python}', *versions, record.date[:10]])}.",
        "",
        "| figure | measured | goal | met |",
        "| --- | ---: | ---: | --- |",
        *map(_line, record.rows),
        "",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    verdict = {None: "", True: "yes", False: "**no**"}[row.ok]
    return f"| {row.figure} | {f'{row.value:,g} {row.unit}'.strip()} | {row.goal} | {verdict} |"


def kept() -> list[Record]:
    """Every kept record. Raises msgspec.ValidationError if a file is of another shape."""
    return [read(path) for path in RESULTS.glob("*.json")]


def main() -> int:
    made = page(kept())
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text("utf-8") != made)
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
