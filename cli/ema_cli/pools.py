"""Pool files: reading them, and `ema check`."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from ema_cli.out import as_json, bad_input, screen
from ema_core.api import MemoryPool, load_pools
from ema_core.errors import InvalidInput
from ema_core.quantity import format_quantity
from ema_core.resolve import implausible

LARGEST = 1 << 20
"""Bytes of a YAML file at most."""


def read_yaml(path: Path, field: str) -> list[object]:
    """The documents of a YAML file. Raises InvalidInput that names the file and the line."""
    try:
        if path.stat().st_size > LARGEST:
            raise InvalidInput.of(field, str(path), f"a file of at most {LARGEST} bytes")
        return [d for d in yaml.safe_load_all(path.read_text("utf-8")) if d is not None]
    except OSError as error:
        raise InvalidInput.of(field, str(path), f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InvalidInput.of(field, str(path), "a text file in UTF-8") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it is nested too deeply"
        raise InvalidInput.of(field, str(path), f"YAML{where}: {problem}") from None


def read_pools(path: Path) -> list[MemoryPool]:
    """The MemoryPools of a file. Raises InvalidInput."""
    return load_pools(read_yaml(path, "pool"))


def check(
    pool: Annotated[Path, typer.Argument(help="MemoryPool file.")],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a pool file: exit code 2 and a line for each wrong field, or what the pool means."""
    with bad_input():
        pools = read_pools(pool)
    warnings = [f"{p.metadata.name}: {w}" for p in pools for w in implausible(p)]
    if json_:
        as_json({"pools": [p.metadata.name for p in pools], "warnings": warnings})
        return
    for p in pools:
        spec = p.spec
        share = spec.lending.max_per_gpu
        lends = f"{share.percent}%" if share.percent is not None else format_quantity(share.amount or 0)
        screen.print(
            f"{p.metadata.name}: each GPU lends at most {lends} and keeps "
            f"{format_quantity(spec.lending.headroom)} free; chunks of {format_quantity(spec.chunk_size)}; "
            f"{format_quantity(spec.reclaim.host_memory)} of host memory stand behind it.",
            highlight=False,
            soft_wrap=True,
        )
    for warning in warnings:
        screen.print(f"warning: {warning}", highlight=False, markup=False)
