"""Lanes: how much traffic a lender bears, and whose turn it is when that is reached.

Without a cap a run is launched at once and the copy engines share the link. With one, each capped lender has a bucket
of bytes that fills at its cap; a run that finds a bucket empty waits its turn, one queue per borrower, round-robin.
Runs of one borrower start in the order in which they were asked for, capped or not. A run that cannot be queued just
now, since memory is swapped behind an address that it names, waits in the same queue for the moment that takes.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from ema_core.ids import LeaseId, Place
from ema_driver.errors import NotMapped

BURST: Final = 0.02
"""Seconds of the cap that a bucket holds at most: what may leave a quiet lender in one go."""

Entry = tuple[Mapping[Place, int], Callable[[], None]]


class Lanes:
    """Buckets per lender and queues per borrower. Belongs to the agent's loop."""

    def __init__(self, clock: Callable[[], float], later: Callable[[float, Callable[[], None]], object]) -> None:
        self.caps: Mapping[Place, int] = {}
        """Lender → bytes per second that copies may read from it or write to it. Others have no cap."""
        self._clock = clock
        self._later = later
        self._level: dict[Place, float] = {}
        self._read_at: dict[Place, float] = {}
        self._queues: dict[LeaseId, deque[Entry]] = {}
        self._timer = False

    def submit(self, lease: LeaseId, sizes: Mapping[Place, int], start: Callable[[], None]) -> None:
        """Start a run of these bytes by place now, or when it is its turn. `start` may raise NotMapped."""
        if lease not in self._queues and self.caps.keys().isdisjoint(sizes) and _starts(start):
            return
        self._queues.setdefault(lease, deque()).append((sizes, start))
        self._serve()

    def forget(self, lease: LeaseId) -> None:
        """The borrower is gone: what it queued is not started."""
        self._queues.pop(lease, None)

    def _serve(self) -> None:
        """Start what the buckets allow, one run per borrower and round; come back later for the rest."""
        self._fill()
        while self._round():
            pass
        if self._queues and not self._timer:
            self._timer = True
            self._later(max(1e-3, min(self._wait(q[0][0]) for q in self._queues.values())), self._wake)

    def _round(self) -> bool:
        """Start one run of each borrower whose turn it can be; whether there was any."""
        before, behind = dict[LeaseId, deque[Entry]](), dict[LeaseId, deque[Entry]]()
        started = False
        for lease, queue in self._queues.items():
            sizes, start = queue[0]
            if self._wait(sizes) or not _starts(start):
                before[lease] = queue
                continue
            queue.popleft()
            for place in sizes.keys() & self.caps.keys():
                self._level[place] -= sizes[place]
            started = True
            if queue:
                behind[lease] = queue
        self._queues = {**before, **behind}  # who was served goes behind the others; who was not keeps its place
        return started

    def _wait(self, sizes: Mapping[Place, int]) -> float:
        """Seconds until every bucket of a run is above zero; at least a trifle if one is not, 0 if all are."""
        low = [p for p in sizes if p in self.caps and self._level[p] <= 0]
        return max((1e-6 - self._level[p] / self.caps[p] for p in low), default=0.0)

    def _fill(self) -> None:
        # A bucket may fall below zero by one run, so that a run larger than the bucket is served too.
        now = self._clock()
        for place, cap in self.caps.items():
            gained = cap * BURST if place not in self._read_at else (now - self._read_at[place]) * cap
            self._level[place] = min(cap * BURST, self._level.get(place, 0.0) + gained)
            self._read_at[place] = now

    def _wake(self) -> None:
        self._timer = False
        self._serve()


def _starts(start: Callable[[], None]) -> bool:
    try:
        start()
    except NotMapped:
        return False
    return True
