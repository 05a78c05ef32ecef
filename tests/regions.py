"""Regions with bytes in them that can be told from any others."""

import ema
from borrower import pattern


def stored(client: ema.Pool, size: int, *, droppable: bool = False) -> ema.Region:
    """A region full of a pattern."""
    region = client.region(size, droppable=droppable)
    region.store(pattern(7, size), at=0)
    return region


def right(region: ema.Region) -> bool:
    """Whether the pattern is in it still."""
    back = bytearray(region.size)
    region.fetch(0, back)
    return back == pattern(7, region.size)
