"""How commands speak: tables for people, one JSON object for programs, and errors that name field, value and remedy."""

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ema_core.errors import InvalidInput

BAD_INPUT = 2
FAILED = 1
screen = Console()
errors = Console(stderr=True)


def complain(message: str) -> None:
    """Say something on the error stream."""
    errors.print(message, highlight=False, markup=False, soft_wrap=True)


def fail(message: str, code: int = FAILED) -> typer.Exit:
    """Say what went wrong; raise what this returns."""
    complain(f"error: {message}")
    return typer.Exit(code)


def write_picture(path: Path, svg: str) -> None:
    """Write a picture. Raises InvalidInput."""
    try:
        path.write_text(svg, "utf-8")
    except OSError as error:
        raise InvalidInput.of("--svg", str(path), f"a file that can be written ({error.strerror})") from None


@contextmanager
def bad_input() -> Iterator[None]:
    """Inside, InvalidInput ends the command with exit code 2 and a line for each wrong field."""
    try:
        yield
    except InvalidInput as refused:
        for one in refused.errors:
            complain(f"error: {one}")
        raise typer.Exit(BAD_INPUT) from None


def as_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON value."""
    sys.stdout.write(json.dumps(value) + "\n")


def size(amount: int | None) -> str:
    """Bytes for people: `1.5 GiB`."""
    if amount is None:
        return "?"
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> Table:
    """A table whose columns named in `right` are right-aligned; no frame, so that more of it fits on a terminal."""
    made = Table(header_style="bold", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
