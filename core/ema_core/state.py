"""What the policy sees: one node's GPUs, paths and leases at one moment.

All amounts are integers in bytes; all times are seconds of one monotonic clock that the caller owns. Every value is
immutable; the order of tuples never matters to the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ema_core.ids import GpuId, LeaseId, Place, PoolName


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
    """A sick or draining GPU lends nothing, and what it lends is moved away."""


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

    @property
    def kept(self) -> int:
        """Bytes that must not be lost."""
        return self.clean + self.dirty

    @property
    def total(self) -> int:
        """All bytes of this lease at this place."""
        return self.clean + self.dirty + self.droppable


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

    @property
    def demand(self) -> int:
        """Bytes wanted in all."""
        return self.kept + self.droppable

    @property
    def held_total(self) -> int:
        """Bytes held in all, on GPUs and in host memory."""
        return sum(h.total for h in self.held.values())


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
