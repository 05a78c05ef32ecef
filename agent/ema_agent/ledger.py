"""The ledger: which chunk of which lease is where, as an explicit state machine.

    (free) → DIRTY ⇄ CLEAN          lent on a GPU, without / with a true copy in host memory
    DIRTY, CLEAN, HOST → MOVING     its gate is closed, its bytes are on their way
    MOVING → DIRTY, CLEAN, HOST     arrived
    MOVING → DROPPED                given up, with the borrower's leave; its address shows scratch memory
    DIRTY, CLEAN, MOVING → LOST     its GPU is gone and there was no true copy
    any → (free)                    the lease gave it back

The ledger decides nothing and touches no memory. It belongs to one thread. A transition that is not drawn above raises
`LedgerError`; giving the same chunk back twice changes nothing and is counted. Amounts are bytes and cannot go below
zero.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ema_agent.gates import Gate
from ema_core import state
from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName
from ema_driver.protocol import Address, Handle


class LedgerError(Exception):
    """A transition that the state machine does not have: a fault of the agent, never of a client."""


class State(StrEnum):
    """Where a chunk is in its life."""

    DIRTY = "dirty"
    CLEAN = "clean"
    MOVING = "moving"
    HOST = "host"
    DROPPED = "dropped"
    LOST = "lost"


ALLOWED: dict[State, frozenset[State]] = {
    State.DIRTY: frozenset({State.CLEAN, State.MOVING, State.LOST}),
    State.CLEAN: frozenset({State.DIRTY, State.MOVING, State.LOST}),
    State.HOST: frozenset({State.MOVING}),
    State.MOVING: frozenset({State.DIRTY, State.CLEAN, State.HOST, State.DROPPED, State.LOST}),
    State.DROPPED: frozenset(),
    State.LOST: frozenset(),
}


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
    usable: int = 0
    """Chunks that the client was told of: copies may name these."""
    holes: set[int] = field(default_factory=set)
    """Indices that were dropped and asked for again in vain: nobody wants them until they are asked for anew."""

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

    def wanted(self, *, droppable: bool) -> int:
        """Bytes of demand of one kind: all chunks but those that were dropped or lost."""
        gone = (State.DROPPED, State.LOST)
        count = 0
        for region in self.regions.values():
            if region.droppable is droppable:
                count += sum(1 for c in region.chunks if c is not None and c.state not in gone)
                count += len(region.promised) + (0 if self.closing else len(region.missing))
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

    @property
    def borrowed(self) -> int:
        """Bytes held in all."""
        return sum(sum(amounts) for amounts in self.held.values())


class Ledger:
    """All leases and chunks of one node."""

    def __init__(self) -> None:
        self.leases: dict[LeaseId, Lease] = {}
        self.repeats = 0
        """Messages that asked for what had been done already."""
        self.lent: dict[Place, int] = defaultdict(int)
        """Bytes at each place by the ledger; bytes on their way count where they will be."""
        self._ids = itertools.count(1)
        self._live: dict[int, Chunk] = {}

    def open_lease(self, lease: Lease) -> None:
        """Begin an account. Raises LedgerError if the id is taken."""
        if lease.id in self.leases:
            raise LedgerError(f"lease {lease.id} exists")
        self.leases[lease.id] = lease

    def close_lease(self, lease: LeaseId) -> None:
        """End an account that holds nothing; a second time changes nothing."""
        entry = self.leases.get(lease)
        if entry is None:
            self.repeats += 1
            return
        if entry.borrowed or next(entry.chunks(), None) is not None:
            raise LedgerError(f"lease {lease} still holds chunks")
        del self.leases[lease]

    def promise(self, lease: Lease, region: Region, index: int, place: Place) -> None:
        """Grant a wanted index at a place, before its memory is made. Raises LedgerError if it is not missing."""
        if index not in region.missing:
            raise LedgerError(f"region {region.number} of {lease.id} waits for nothing at index {index}")
        region.promised[index] = place
        self._count(lease, place, 2 if region.droppable else 1, lease.chunk)

    def withdraw(self, lease: Lease, region: Region, index: int) -> None:
        """The memory of a promise could not be made, or nobody wants it any more; a second time changes nothing."""
        place = region.promised.pop(index, None)
        if place is None:
            self.repeats += 1
            return
        self._count(lease, place, 2 if region.droppable else 1, -lease.chunk)

    def arrive(
        self, lease: Lease, region: Region, index: int, *, address: Address, gate: Gate, handle: Handle
    ) -> Chunk:
        """The memory of a promise was made. Raises LedgerError if nothing was promised."""
        if index not in region.promised:
            raise LedgerError(f"region {region.number} of {lease.id} was promised nothing at index {index}")
        place = region.promised[index]
        self.withdraw(lease, region, index)
        state = State.HOST if place == HOST else State.DIRTY
        chunk = Chunk(next(self._ids), lease, region, index, lease.chunk, address, gate, place, state, handle)
        region.chunks[index] = chunk
        self._live[chunk.id] = chunk
        self._account(chunk, 1)
        return chunk

    def become(self, chunk: Chunk, state: State, *, place: Place | None = None) -> None:
        """Take one transition; `place` where the bytes are (or, for MOVING, will be). Raises LedgerError."""
        if chunk.id not in self._live:
            raise LedgerError(f"chunk {chunk.id} was given back")
        if state not in ALLOWED[chunk.state]:
            raise LedgerError(f"chunk {chunk.id}: {chunk.state} → {state}")
        self._account(chunk, -1)
        chunk.state = state
        if place is not None:
            chunk.place = place
        self._account(chunk, 1)

    def free(self, chunk: Chunk) -> bool:
        """The chunk was given back. False, and nothing changes, if it had been already."""
        if self._live.pop(chunk.id, None) is None:
            self.repeats += 1
            return False
        self._account(chunk, -1)
        if chunk.index < len(chunk.region.chunks) and chunk.region.chunks[chunk.index] is chunk:
            chunk.region.chunks[chunk.index] = None
        return True

    def alive(self, chunk: Chunk) -> bool:
        """Whether the chunk has not been given back."""
        return chunk.id in self._live

    def chunks(self) -> Iterable[Chunk]:
        """Every live chunk."""
        return self._live.values()

    def pick(self, lease: LeaseId, place: Place, size: int, *, droppable: bool) -> list[Chunk]:
        """Victims: chunks of the lease at the place worth `size` bytes at most; clean before dirty, then coldest.

        Chunks that a worker thread copies just now are passed over: their memory must not be swapped under the copy.
        """
        entry = self.leases.get(lease)
        if entry is None:
            return []
        order = {State.CLEAN: 0, State.HOST: 0, State.DIRTY: 1}
        found = [
            c
            for c in entry.chunks()
            if c.place == place and c.state in order and c.region.droppable is droppable and not c.busy
        ]
        found.sort(key=lambda c: (order[c.state], c.last_used, c.id))
        return found[: size // entry.chunk]

    def policy_leases(self) -> tuple[state.Lease, ...]:
        """The leases as the policy sees them."""
        return tuple(
            state.Lease(
                id=e.id,
                pool=e.pool,
                gpu=e.gpu,
                priority=e.priority,
                weight=e.weight,
                guaranteed=e.guaranteed,
                limit=e.limit,
                kept=e.wanted(droppable=False),
                droppable=e.wanted(droppable=True),
                asked_at=e.asked_at,
                granted_at=e.granted_at,
                reclaimed_at=e.reclaimed_at,
                held={
                    place: state.Holding(clean=a[0], dirty=a[1], droppable=a[2], last_used=e.last_used)
                    for place, a in e.held.items()
                    if any(a)
                },
            )
            for e in self.leases.values()
        )

    def _account(self, chunk: Chunk, sign: int) -> None:
        if chunk.state in (State.DROPPED, State.LOST):
            return
        clean = chunk.state in (State.CLEAN, State.HOST)
        kind = 2 if chunk.droppable else (0 if clean else 1)
        self._count(chunk.lease, chunk.place, kind, sign * chunk.size)

    def _count(self, lease: Lease, place: Place, kind: int, size: int) -> None:
        amounts = lease.held.setdefault(place, [0, 0, 0])
        amounts[kind] += size
        self.lent[place] += size
        if amounts[kind] < 0 or self.lent[place] < 0:
            raise LedgerError(f"{lease.id} would hold less than nothing at {place}")
