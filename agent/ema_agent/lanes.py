"""Lanes: how fast traffic may leave a lender, and whose turn it is when the cap is reached.

Without a cap a run is launched at once and the copy engines share the link. With one, each lender has a bucket of bytes
that fills at the cap; a run that finds a bucket empty waits its turn, one queue per borrower, served round-robin.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from ema_core.ids import HOST, LeaseId, Place

BURST: Final = 0.02
"""Seconds of the cap that a bucket holds at most: what may leave a quiet lender in one go."""

Entry = tuple[Mapping[Place, int], Callable[[], None]]


class Lanes:
    """Buckets per lender and queues per borrower. Belongs to the agent's loop."""

    def __init__(
        self, cap: int, clock: Callable[[], float], later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        self.cap = cap
        """Bytes per second that may leave one lender; 0 for no cap."""
        self._clock = clock
        self._later = later
        self._level: dict[Place, float] = {}
        self._read_at: dict[Place, float] = {}
        self._queues: dict[LeaseId, deque[Entry]] = {}
        self._timer = False

    def submit(self, lease: LeaseId, sizes: Mapping[Place, int], start: Callable[[], None]) -> None:
        """Start a run of these bytes by lender now, or when it is its turn."""
        capped = {p: n for p, n in sizes.items() if p != HOST}
        if not self.cap or not capped:
            start()
            return
        self._queues.setdefault(lease, deque()).append((capped, start))
        self._serve()

    def forget(self, lease: LeaseId) -> None:
        """The borrower is gone: what it queued is not started."""
        self._queues.pop(lease, None)

    def _serve(self) -> None:
        """Start what the buckets allow, one run per borrower and round; come back later for the rest."""
        self._fill()
        moved = True
        while moved:
            moved = False
            for lease in list(self._queues):
                queue = self._queues.pop(lease)
                sizes, start = queue[0]
                if ready := all(self._level[p] > 0 for p in sizes):
                    queue.popleft()
                    for place, size in sizes.items():
                        self._level[place] -= size
                    start()
                    moved = True
                if queue:
                    # A borrower that was served goes behind the others; one that was not keeps its turn.
                    self._queues = {**self._queues, lease: queue} if ready else {lease: queue, **self._queues}
        if self._queues and not self._timer:
            self._timer = True
            debt = min(max(-self._level[p] for p in q[0][0]) for q in self._queues.values())
            self._later(max(1e-3, debt / self.cap), self._wake)

    def _fill(self) -> None:
        # A bucket may fall below zero by one run, so that a run larger than the bucket is served too.
        now = self._clock()
        full = self.cap * BURST
        for place in {p for q in self._queues.values() for sizes, _ in q for p in sizes}:
            gained = full if place not in self._read_at else (now - self._read_at[place]) * self.cap
            self._level[place] = min(full, self._level.get(place, 0.0) + gained)
            self._read_at[place] = now

    def _wake(self) -> None:
        self._timer = False
        self._serve()
