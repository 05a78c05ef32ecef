"""What a benchmark keeps: one schema for every file in `bench/results/`, which `report.py` turns into a page."""

import argparse
import math
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

RESULTS: Final = Path(__file__).parent / "results"


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure. `goal` says what was aimed at, in words; `bound` is that as a number, of the same unit."""

    figure: str
    value: float
    unit: str
    goal: str = ""
    bound: float | None = None
    ok: bool | None = None
    """Whether the goal was met; None where there is none."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of one benchmark."""

    name: str
    what: str
    machine: str
    date: str
    python: str
    versions: dict[str, str] = {}
    """Of what else the figures depend on: GPU driver, torch and the like."""
    rows: list[Row]

    @property
    def ok(self) -> bool:
        """No goal was missed."""
        return all(row.ok is not False for row in self.rows)


def plain(figure: str, value: float, unit: str) -> Row:
    """A figure without a goal."""
    return Row(figure=figure, value=_short(value), unit=unit)


def at_most(bound: float, figure: str, value: float, unit: str) -> Row:
    """A figure that must not be above `bound`."""
    return Row(figure=figure, value=_short(value), unit=unit, goal=f"≤ {bound:g}", bound=bound, ok=value <= bound)


def at_least(bound: float, figure: str, value: float, unit: str) -> Row:
    """A figure that must not be below `bound`."""
    return Row(figure=figure, value=_short(value), unit=unit, goal=f"≥ {bound:g}", bound=bound, ok=value >= bound)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def record(name: str, what: str, rows: list[Row], *, gpu: str = "", versions: dict[str, str] | None = None) -> Record:
    """A run that has just ended, on this machine."""
    return Record(
        name=name,
        what=what,
        machine=", ".join(filter(None, (gpu, machine()))),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        versions=versions or {},
        rows=rows,
    )


def finish(done: Record) -> int:
    """Print a record, keep it unless `--no-save` was given; the exit code: 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=done.what)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options, _ = parser.parse_known_args()
    width = max(len(row.figure) for row in done.rows)
    for row in done.rows:
        verdict = "" if row.ok is None else f"   {row.goal} {'ok' if row.ok else 'MISSED'}"
        sys.stdout.write(f"{row.figure:{width}}  {row.value:>10g} {row.unit}{verdict}\n")
    if not options.no_save:
        RESULTS.mkdir(exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(done), indent=2) + b"\n"
        (RESULTS / f"{done.name}.json").write_bytes(data)
    return int(not done.ok)


def read(path: Path) -> Record:
    """A kept record. Raises msgspec.ValidationError if the file is of another shape."""
    return msgspec.json.decode(path.read_bytes(), type=Record)


def machine() -> str:
    """Processor, cores and system, as far as Linux says them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that `percent` per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
