"""Who hears what happens to leases, and what is heard of a reclaim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ema_agent.lease import Lease, Region
from ema_core.ids import LeaseId, Place
from ema_core.plan import Cause, Plan


@dataclass(frozen=True, slots=True)
class Reclaim:
    """One batch that was taken from a place."""

    lease: LeaseId
    source: Place
    target: Place | None
    """None: dropped."""
    size: int
    cause: Cause
    clean: bool
    seconds: float
    """From the decision until the driver had the bytes back."""
    own_seconds: float
    """Of these, until no copy could touch the chunks any more: what came then were the driver's calls."""


class Listener(Protocol):
    """Who hears what happened to leases: the sessions and the metrics."""

    def moved(self, lease: Lease, region: Region, size: int) -> None:
        """Bytes of a region changed place."""

    def dropped(self, lease: Lease, region: Region, chunks: Sequence[int]) -> None:
        """Chunks are about to be dropped; called while their gates are still closed."""

    def lost(self, lease: Lease, region: Region, chunks: Sequence[int], cause: str) -> None:
        """Chunks are gone, mostly with their GPU; their gates stay closed."""

    def granted(self, lease: Lease, region: Region) -> None:
        """The memory of a promise has arrived."""

    def reclaimed(self, record: Reclaim) -> None:
        """Bytes were taken from where they were."""

    def planned(self, outcome: Plan, seconds: float) -> None:
        """A plan was made."""
