"""`ema check`: is a pool file right, and what does it mean."""

from pathlib import Path
from typing import Annotated

import typer

from ema_cli.out import as_json, bad_input, screen
from ema_cli.pool_file import read_pools
from ema_core.quantity import format_quantity
from ema_core.resolve import implausible


def check(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="MemoryPool file.")],
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
