"""Who competes with whom: what hardly ever changes about the leases of a node.

Demands, holdings and room change all the time; pools, own GPUs, weights and priorities do not. What follows from these
alone is worked out once and remembered.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress

from ema_core.ids import GpuId, PoolName
from ema_core.policy.seats import Claims


class Standing:
    """The leases of a node side by side, older first; made by `standing` alone, which remembers it."""

    __slots__ = ("_of_pool", "by_lenders", "by_pool", "chunk", "group", "groups", "pool", "queue")

    def __init__(
        self,
        known: Sequence[tuple[PoolName, int]],
        pools: Sequence[PoolName],
        gpus: Sequence[GpuId],
        weights: Sequence[int],
        priorities: Sequence[int],
    ) -> None:
        number = {name: p for p, (name, _) in enumerate(known)}
        self.chunk = tuple([chunk for _, chunk in known])
        """Of each pool."""
        self.pool = tuple([number[name] for name in pools])
        """Of each lease."""
        keys = list(zip(self.pool, gpus, strict=True))
        self.groups = tuple(sorted(set(keys)))
        """Pool and own GPU of each group: its leases reach the same lenders."""
        place = {key: group for group, key in enumerate(self.groups)}
        self.group = tuple([place[key] for key in keys])
        """Of each lease."""
        self.queue = tuple(sorted(range(len(keys)), key=lambda i: -priorities[i]))
        """All leases: highest priority first, then the older."""
        self.by_lenders = Claims(self.group, weights, priorities, [self.chunk[p] for p, _ in self.groups])
        self.by_pool = Claims(self.pool, weights, priorities, self.chunk)
        self._of_pool = [[p == q for p in self.pool] for q in range(len(known))]

    def sums(self, sizes: Sequence[int]) -> list[int]:
        """Sums of one figure per lease, for each pool."""
        if len(self.chunk) == 1:
            return [sum(sizes)]
        return [sum(compress(sizes, mask)) for mask in self._of_pool]


@lru_cache(maxsize=4)
def standing(
    known: tuple[tuple[PoolName, int], ...],
    pools: tuple[PoolName, ...],
    gpus: tuple[GpuId, ...],
    weights: tuple[int, ...],
    priorities: tuple[int, ...],
) -> Standing:
    """The standing of leases, one entry each, older first; `known` are the pools' names and chunks."""
    return Standing(known, pools, gpus, weights, priorities)
