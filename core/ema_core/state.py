"""What the policy sees: one node's GPUs, paths and leases at one moment.

All amounts are integers in bytes; all times are seconds of one monotonic clock that the caller owns. Every value is
immutable; the order of tuples never matters to the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName


def _never_negative(of: str, **amounts: float) -> None:
    for name, amount in amounts.items():
        if amount < 0:
            raise ValueError(f"{of}: {name} is {amount}; it must be 0 or more")


def _at_least_one(of: str, **amounts: int) -> None:
    for name, amount in amounts.items():
        if amount < 1:
            raise ValueError(f"{of}: {name} is {amount}; it must be 1 or more")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as a possible lender."""

    id: GpuId
    total: int
    """Bytes the device has."""
    reserved: int
    """Bytes the driver keeps for itself (inside `total`, never lendable)."""
    used: int
    """Bytes that anybody but us uses, with what was promised to the GPU's own share and not yet taken."""
    lends: bool = True
    """Nobody owns this GPU, or its owner opted in."""
    healthy: bool = True
    """A sick GPU lends nothing, and what it lends is moved away."""

    def __post_init__(self) -> None:
        _never_negative(f"gpu {self.id}", total=self.total, reserved=self.reserved, used=self.used)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one lease has at one place. The three amounts are disjoint."""

    clean: int = 0
    """Kept bytes with a true copy in host memory: taking them is a drop of the copy on the GPU."""
    dirty: int = 0
    """Kept bytes whose only true copy is here."""
    droppable: int = 0
    """Bytes the borrower agreed to lose."""
    last_used: float = 0.0
    """When a copy last touched them, for choosing the coldest."""

    def __post_init__(self) -> None:
        if self.clean < 0 or self.dirty < 0 or self.droppable < 0:
            _never_negative("holding", clean=self.clean, dirty=self.dirty, droppable=self.droppable)

    @property
    def kept(self) -> int:
        """Bytes that must not be lost."""
        return self.clean + self.dirty

    @property
    def total(self) -> int:
        """All bytes of this lease at this place."""
        return self.clean + self.dirty + self.droppable


Layout = tuple[int, tuple[Place, ...]]
"""Chunk size in bytes, and the places of a node."""


class Figures(NamedTuple):
    """One lease for the policy's inner loops: bytes, in whole chunks."""

    layout: Layout
    """What the figures were made for."""
    kept_wanted: int
    """Rounded up, within the limit."""
    droppable_wanted: int
    """Rounded up."""
    asked: int
    """Demand in all, to the byte, within the limit."""
    limit: int
    """Rounded down."""
    assured: int
    """The guaranteed amount, rounded down."""
    kept: int
    """Held anywhere."""
    droppable: int
    """Held anywhere."""
    held: int
    """In all."""
    on_gpus: int
    droppable_on_host: int
    weight: int
    priority: int
    gpu: GpuId
    pool: PoolName
    at: tuple[int, ...]
    """Bytes held at each place of the layout."""
    astray: tuple[tuple[Place, int], ...]
    """Bytes held at places that are not in the layout."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One borrower: what it may have, what it wants, what it has."""

    id: LeaseId
    pool: PoolName
    gpu: GpuId
    """The borrower's own GPU; a lease is never placed there."""
    priority: int = 0
    weight: int = 1
    guaranteed: int = 0
    limit: int = 0
    """Most it may hold, in bytes."""
    kept: int = 0
    """Demand: bytes wanted in all that must not be lost."""
    droppable: int = 0
    """Demand: bytes wanted in all that may be dropped."""
    asked_at: float = 0.0
    """When the oldest unmet demand was made: order in the queue among equals."""
    granted_at: float = float("-inf")
    """When it last grew: `minHold` protects it from its equals until then plus minHold."""
    reclaimed_at: float = float("-inf")
    """When something was last taken from it: it does not jump back before minHold has passed."""
    held: Mapping[Place, Holding] = field(default_factory=dict)
    figures: Figures | None = field(default=None, init=False, repr=False, compare=False)
    """What `count` found last: a lease never changes, and the policy looks at each one many times."""

    def __post_init__(self) -> None:
        if self.guaranteed < 0 or self.limit < 0 or self.kept < 0 or self.droppable < 0 or self.weight < 1:
            of = f"lease {self.id}"
            _at_least_one(of, weight=self.weight)
            _never_negative(of, guaranteed=self.guaranteed, limit=self.limit, kept=self.kept, droppable=self.droppable)

    @property
    def demand(self) -> int:
        """Bytes wanted in all."""
        return self.kept + self.droppable

    def count(self, layout: Layout) -> Figures:
        """This lease in whole chunks, added up."""
        chunk, places = layout
        kept = droppable = on_host = droppable_on_host = 0
        sizes = {}
        for place, h in self.held.items():
            surely, maybe = h.clean + h.dirty, h.droppable
            kept += surely
            droppable += maybe
            sizes[place] = surely + maybe
            if place == HOST:
                on_host, droppable_on_host = surely + maybe, maybe
        limit = self.limit // chunk * chunk
        # By position: naming all fields costs as much as all the rest here.
        figures = Figures(
            layout,
            min(limit, -(-self.kept // chunk) * chunk),
            -(-self.droppable // chunk) * chunk,
            min(limit, self.kept + self.droppable),
            limit,
            self.guaranteed // chunk * chunk,
            kept,
            droppable,
            kept + droppable,
            kept + droppable - on_host,
            droppable_on_host,
            self.weight,
            self.priority,
            self.gpu,
            self.pool,
            tuple(map(sizes.pop, places, repeat(0))),
            tuple(sizes.items()),
        )
        object.__setattr__(self, "figures", figures)
        return figures

    @property
    def held_total(self) -> int:
        """Bytes held in all, on GPUs and in host memory."""
        return sum(h.clean + h.dirty + h.droppable for h in self.held.values())


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node at one moment."""

    gpus: tuple[Gpu, ...]
    paths: Mapping[tuple[Place, Place], int]
    """Verified paths, lender place → borrower GPU, with their rate in bytes per second. A pair that is not here is
    barred. Paths from and to `HOST` are named like any other."""
    leases: tuple[Lease, ...] = ()
    draining: frozenset[Place] = frozenset()
    """Places that an administrator empties: nothing new, and what is there moves away."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """The part of a MemoryPool that the policy needs, with percentages and defaults resolved."""

    name: PoolName
    gpus: frozenset[GpuId]
    """GPUs of this node that the pool selects."""
    max_per_gpu: Mapping[GpuId, int]
    """Most that may be lent from each GPU, in bytes."""
    headroom: int
    """Bytes kept free on every lending GPU."""
    hysteresis: int
    """Extra free bytes, beyond headroom, that a GPU must have before it lends more."""
    chunk: int
    """Size of a chunk: every grant and move is a whole number of chunks."""
    host_spill: int = 0
    """Host bytes for copies of kept bytes. Kept bytes are lent only while room for them is reserved here."""
    host_lend: int = 0
    """Host bytes offered as a lender of last resort."""
    spill_to_peer: bool = True
    spill_to_host: bool = True
    spill_to_drop: bool = True
    """Droppable bytes may be dropped when nothing else has room."""
    min_hold: float = 5.0
    """Seconds."""

    def __post_init__(self) -> None:
        of = f"pool {self.name}"
        _at_least_one(of, chunk=self.chunk)
        _never_negative(of, headroom=self.headroom, hysteresis=self.hysteresis, min_hold=self.min_hold)
        _never_negative(of, host_spill=self.host_spill, host_lend=self.host_lend)
        _never_negative(of, **{f"max_per_gpu[{gpu}]": size for gpu, size in self.max_per_gpu.items()})
