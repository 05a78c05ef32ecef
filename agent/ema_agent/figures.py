"""What is counted: the numbers behind `ema status`, the metrics and the demo's table."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from ema_agent.listener import Reclaim
from ema_core.ids import GpuId, PoolName
from ema_core.plan import Cause, Plan

KEPT: Final = 4096
"""Reclaims whose duration is kept for percentiles."""
BUCKETS: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.5)
"""Upper bounds of the duration histogram, seconds."""


@dataclass(slots=True)
class Durations:
    """A histogram of durations in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.total += seconds
        self.counts[next((i for i, b in enumerate(BUCKETS) if seconds <= b), len(BUCKETS))] += 1


class Figures:
    """Counters. Belongs to the agent's loop."""

    def __init__(self) -> None:
        self.reclaims: dict[tuple[Cause, bool], Durations] = {}
        self.reclaimed_bytes: Counter[tuple[Cause, bool]] = Counter()
        self.moved_bytes: Counter[PoolName] = Counter()
        self.lost_bytes: Counter[PoolName] = Counter()
        self.recent: deque[Reclaim] = deque(maxlen=KEPT)
        self.shortfall_seconds: dict[GpuId, float] = {}
        self.plans = Durations()
        self.overdue_bytes = 0
        self._short_since: dict[GpuId, float] = {}

    def reclaimed(self, record: Reclaim) -> None:
        """One batch was taken."""
        key = record.cause, record.clean
        self.reclaims.setdefault(key, Durations()).add(record.seconds)
        self.reclaimed_bytes[key] += record.size
        self.recent.append(record)

    def moved(self, pool: PoolName, size: int) -> None:
        """Bytes changed place."""
        self.moved_bytes[pool] += size

    def lost(self, pool: PoolName, size: int) -> None:
        """Bytes went with their GPU."""
        self.lost_bytes[pool] += size

    def planned(self, outcome: Plan, seconds: float) -> None:
        """A plan was made."""
        self.plans.add(seconds)
        self.overdue_bytes = sum(o.size for o in outcome.overdue)

    def shortfall(self, gpu: GpuId, now: float) -> None:
        """A lending GPU has less free than its headroom."""
        since = self._short_since.get(gpu, now)
        self.shortfall_seconds[gpu] = self.shortfall_seconds.get(gpu, 0.0) + now - since
        self._short_since[gpu] = now

    def no_shortfall(self, gpu: GpuId, now: float) -> None:
        """It has enough again."""
        if gpu in self._short_since:
            self.shortfall(gpu, now)
            del self._short_since[gpu]
