"""What the ledger keeps book of: leases, their regions, and the chunks of these.

Plain records with what can be read off them. Only the ledger changes a chunk's state and place, and the amounts held.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ema_agent.gates import Gate
from ema_core import state
from ema_core.ids import GpuId, LeaseId, Place, PoolName
from ema_driver.protocol import Address, Handle


class State(StrEnum):
    """Where a chunk is in its life."""

    DIRTY = "dirty"
    CLEAN = "clean"
    MOVING = "moving"
    HOST = "host"
    DROPPED = "dropped"
    LOST = "lost"


GONE: frozenset[State] = frozenset({State.DROPPED, State.LOST})
"""States without bytes."""


@dataclass(slots=True, eq=False, repr=False)
class Chunk:
    """One chunk: a stable address, and the memory behind it."""

    id: int
    lease: "Lease"
    region: "Region"
    index: int
    size: int
    address: Address
    gate: Gate
    place: Place
    """Where its bytes are; while MOVING, where they will be."""
    state: State
    handle: Handle
    """The memory mapped at `address`."""
    mapped: bool = True
    """Whether it is; else nothing is mapped there, and the gate must stay closed."""
    twin: Handle | None = None
    """Host memory with the same bytes, true while the gate's dirty word is 0."""
    last_used: float = 0.0
    busy: bool = False
    """A worker thread is copying it to its twin, or its borrower gives it back: no victim just now."""

    @property
    def droppable(self) -> bool:
        """Whether the borrower agreed to lose it."""
        return self.region.droppable

    @property
    def has_true_twin(self) -> bool:
        """Whether host memory holds the same bytes. No answer while it is `busy`."""
        return self.twin is not None and not self.gate.dirty


@dataclass(slots=True, eq=False, repr=False)
class Region:
    """A borrower's range of bytes: chunk `i` holds the bytes from `i × chunk size` on."""

    number: int
    droppable: bool
    chunks: list[Chunk | None] = field(default_factory=list)
    """None: wanted and not there yet."""
    promised: dict[int, Place] = field(default_factory=dict)
    """Indices that were granted and whose memory is being made, and where."""
    torn: bool = False
    """Whether a chunk of it was ever dropped or lost."""
    usable: int = 0
    """Chunks that the client was told of: copies may name these."""
    holes: set[int] = field(default_factory=set)
    """Indices that were dropped and asked for again in vain: nobody wants them until they are asked for anew."""

    def lacks(self, index: int) -> bool:
        """Whether an index waits for a grant."""
        wanted = 0 <= index < len(self.chunks) and self.chunks[index] is None
        return wanted and index not in self.promised and index not in self.holes

    @property
    def missing(self) -> list[int]:
        """Indices that wait for a grant."""
        holes = self.holes
        return [i for i, c in enumerate(self.chunks) if c is None and i not in self.promised and i not in holes]

    @property
    def gone(self) -> list[int]:
        """Indices whose bytes were dropped and not renewed."""
        holes = self.holes
        return [i for i, c in enumerate(self.chunks) if i in holes or (c is not None and c.state is State.DROPPED)]


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """One borrower's account."""

    id: LeaseId
    pool: PoolName
    gpu: GpuId
    chunk: int
    name: str = ""
    counts_on: GpuId | None = None
    """The GPU that the policy takes for its own, if not `gpu`: see `Node.loopback`."""
    priority: int = 0
    weight: int = 1
    guaranteed: int = 0
    limit: int = 0
    regions: dict[int, Region] = field(default_factory=dict)
    asked_at: float = 0.0
    granted_at: float = float("-inf")
    reclaimed_at: float = float("-inf")
    last_used: float = 0.0
    closing: bool = False
    """Its borrower is gone: it waits for nothing any more."""
    held: dict[Place, list[int]] = field(default_factory=dict)
    """Place → bytes [clean, dirty, droppable]."""
    drops: dict[int, int] = field(default_factory=dict)
    """Region number → how often chunks were dropped, as its notice word says: never the same twice, whatever region
    has the number."""
    recent: dict[int, tuple[float, list["Chunk"]]] = field(default_factory=dict)
    """Program → when it last started and the chunks it copies; read when victims are picked, not on a step's path."""
    version: int = 0
    """Changes whenever an amount in `held` does."""
    _seen: "tuple[tuple[int, int, int, int, int, int, float, float, float, float, int], state.Lease] | None" = None

    def wanted(self, *, droppable: bool) -> int:
        """Bytes of demand of one kind: all chunks but those that were dropped or lost."""
        count = 0
        for region in self.regions.values():
            if region.droppable is not droppable:
                continue
            if region.torn or region.holes or self.closing:
                count += sum(1 for c in region.chunks if c is not None and c.state not in GONE)
                count += len(region.promised) + (0 if self.closing else len(region.missing))
            else:
                count += len(region.chunks)
        return count * self.chunk

    def missing(self, *, droppable: bool) -> Iterator[tuple[Region, int]]:
        """Chunks that wait for a grant, oldest region first."""
        if self.closing:
            return
        for region in self.regions.values():
            if region.droppable is droppable:
                for index in region.missing:
                    yield region, index

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk that exists."""
        for region in self.regions.values():
            for chunk in region.chunks:
                if chunk is not None:
                    yield chunk

    def for_policy(self) -> state.Lease:
        """This lease as the policy sees it. What was found last is kept, with what the policy counted in it."""
        terms = (
            *(self.priority, self.weight, self.guaranteed, self.limit),
            *(self.wanted(droppable=False), self.wanted(droppable=True)),
            *(self.asked_at, self.granted_at, self.reclaimed_at),
            *(self.last_used, self.version),
        )
        if self._seen is None or self._seen[0] != terms:
            priority, weight, guaranteed, limit, kept, droppable, asked_at, granted_at, reclaimed_at, used, _ = terms
            lease = state.Lease(
                id=self.id,
                pool=self.pool,
                gpu=self.counts_on or self.gpu,
                priority=priority,
                weight=weight,
                guaranteed=guaranteed,
                limit=limit,
                kept=kept,
                droppable=droppable,
                asked_at=asked_at,
                granted_at=granted_at,
                reclaimed_at=reclaimed_at,
                held={
                    place: state.Holding(clean=a[0], dirty=a[1], droppable=a[2], last_used=used)
                    for place, a in self.held.items()
                    if any(a)
                },
            )
            self._seen = terms, lease
        return self._seen[1]

    @property
    def borrowed(self) -> int:
        """Bytes held in all."""
        return sum(sum(amounts) for amounts in self.held.values())
