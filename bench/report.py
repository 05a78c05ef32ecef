"""`docs/performance.md` and the figures in the README, made from the kept results and never by hand.

    python bench/report.py [--check]

`--check` writes nothing and fails if a page is not what the results say.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from record import RESULTS, Record, Row, read

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- made by bench/report.py -->\n", "<!-- end -->\n"
HEADLINES = {
    "streaming": (
        "whole layers, 2048 tokens",
        "whole layers, 2048 tokens: accelerate cpu_offload",
        "scale model, 8 multiprocessors, 7.9 % of every layer remote",
    ),
    "serving": (
        "weights 90 % of the share, saturated: gain that the bound predicts",
        "weights 90 % of the share, saturated: borrowing over static",
        "weights 90 % of the share, load 1.5: borrowing, of twice the memory",
    ),
    "training": (
        "scale model, 16 multiprocessors, hidden size 2560: borrowed, of local speed",
        "scale model, 16 multiprocessors, hidden size 2560: borrowed over recomputed",
        "scale model, 16 multiprocessors, hidden size 2560: save_on_cpu, of local speed",
    ),
}
"""Benchmark → the figures that the README shows."""
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


def _line(row: Row, before: str = "") -> str:
    verdict = {None: "", True: "yes", False: "**no**"}[row.ok]
    return f"| {before}{row.figure} | {f'{row.value:,g} {row.unit}'.strip()} | {row.goal} | {verdict} |"


def headlines(records: Iterable[Record]) -> str:
    """The README's table."""
    lines = ["| on a real GPU | measured | goal | met |", "| --- | ---: | ---: | --- |"]
    for record in sorted(records, key=lambda r: r.name):
        wanted = HEADLINES.get(record.name, ())
        model = " (scale model)" if "scale model" in record.what else ""
        lines += [_line(row, f"{record.name}{model}: ") for row in record.rows if row.figure in wanted]
    return "\n".join([*lines, ""])


def kept() -> list[Record]:
    """Every kept record. Raises msgspec.ValidationError if a file is of another shape."""
    return [read(path) for path in RESULTS.glob("*.json")]


def readme(text: str, records: Iterable[Record]) -> str:
    """The README with its figures renewed."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + headlines(records) + END + rest.split(END)[1]


def main() -> int:
    records = kept()
    pages = {PAGE: page(records), README: readme(README.read_text("utf-8"), records)}
    if "--check" in sys.argv:
        return int(any(not path.exists() or path.read_text("utf-8") != text for path, text in pages.items()))
    for path, text in pages.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
