"""Fetches from droppable regions that are still to be checked: bytes may be dropped before the copy is made.

So they are looked at again when the slot is waited for, before anybody uses them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ema.region import Region


class Unchecked:
    """What of a droppable region is being fetched into which slot."""

    def __init__(self) -> None:
        self._fetched: dict[int, tuple[Region, int, int, int]] = {}
        """Slot → region, offset, bytes, and how often the region was renewed before."""

    def add(self, slot: int, region: "Region", at: int, size: int) -> None:
        """A fetch begins."""
        self._fetched[slot] = (region, at, size, region.renewals)

    def forget(self, slot: int) -> None:
        """It is another window's slot now."""
        self._fetched.pop(slot, None)

    def clear(self) -> None:
        """The regions went with their agent."""
        self._fetched.clear()

    def check(self, slot: int) -> None:
        """Raise Reclaimed if what was fetched into the slot had been dropped."""
        if self._fetched and (fetched := self._fetched.pop(slot, None)) is not None:
            region, at, size, renewals = fetched
            region.check_dropped(at, size, renewals)
