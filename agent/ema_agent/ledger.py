"""The ledger: which chunk of which lease is where, as an explicit state machine.

    (free) → DIRTY ⇄ CLEAN          lent on a GPU, without / with a true copy in host memory
    DIRTY, CLEAN, HOST → MOVING     its gate is closed, its bytes are on their way
    MOVING → DIRTY, CLEAN, HOST     arrived
    MOVING → DROPPED                given up, with the borrower's leave; its address shows scratch memory
    DIRTY, CLEAN, MOVING → LOST     its GPU is gone and there was no true copy, or nothing can be mapped at its address
    DROPPED → LOST                  the same, after it was dropped
    any → (free)                    the lease gave it back

The ledger decides nothing and touches no memory. It belongs to one thread. A transition that is not drawn above raises
`LedgerError`; giving the same chunk back twice changes nothing and is counted. Amounts are bytes and cannot go below
zero.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

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
    State.DROPPED: frozenset({State.LOST}),
    State.LOST: frozenset(),
}
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
                gpu=self.gpu,
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


_coldest = attrgetter("last_used", "id")


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
        if not region.lacks(index):
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
        self._account_all((chunk,), 1)
        return chunk

    def become(self, chunk: Chunk, state: State, *, place: Place | None = None) -> None:
        """Take one transition; `place` where the bytes are (or, for MOVING, will be). Raises LedgerError."""
        self.become_all((chunk,), state, place=place)

    def become_all(self, chunks: Collection[Chunk], state: State, *, place: Place | None = None) -> None:
        """The same transition for many chunks, of which all or, with LedgerError, none take it."""
        live, seen = self._live, None
        for chunk in chunks:
            if chunk.id not in live:
                raise LedgerError(f"chunk {chunk.id} was given back")
            if chunk.state is not seen:
                seen = chunk.state
                if state not in ALLOWED[seen]:
                    raise LedgerError(f"chunk {chunk.id}: {seen} → {state}")
        self._account_all(chunks, -1)
        gone = state in GONE
        for chunk in chunks:
            chunk.state = state
            if place is not None:
                chunk.place = place
            if gone:
                chunk.region.torn = True
        self._account_all(chunks, 1)

    def free(self, chunk: Chunk) -> bool:
        """The chunk was given back. False, and nothing changes, if it had been already."""
        if self._live.pop(chunk.id, None) is None:
            self.repeats += 1
            return False
        self._account_all((chunk,), -1)
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
        for started, copied in entry.recent.values():
            for c in copied:
                c.last_used = max(c.last_used, started)
        here = [
            c
            for region in entry.regions.values()
            if region.droppable is droppable
            for c in region.chunks
            if c is not None and c.place == place and not c.busy
        ]
        clean = [c for c in here if c.state is State.CLEAN or c.state is State.HOST]
        dirty = [c for c in here if c.state is State.DIRTY]
        count = size // entry.chunk
        clean.sort(key=_coldest)
        if len(clean) < count:
            dirty.sort(key=_coldest)
            clean += dirty
        return clean[:count]

    def policy_leases(self) -> tuple[state.Lease, ...]:
        """The leases as the policy sees them: the same object as before for one that has not changed."""
        return tuple([e.for_policy() for e in self.leases.values()])

    def _account_all(self, chunks: Iterable[Chunk], sign: int) -> None:
        sums: dict[tuple[Lease, Place, int], int] = {}
        seen, kept = None, 0
        for chunk in chunks:
            # Mostly all are alike, and looking a state up costs more than all the rest.
            if chunk.state is not seen:
                seen = chunk.state
                kept = -1 if seen in GONE else 0 if seen in {State.CLEAN, State.HOST} else 1
            if kept < 0:
                continue
            kind = 2 if chunk.region.droppable else kept
            key = (chunk.lease, chunk.place, kind)
            sums[key] = sums.get(key, 0) + chunk.size
        for (lease, place, kind), size in sums.items():
            self._count(lease, place, kind, sign * size)

    def _count(self, lease: Lease, place: Place, kind: int, size: int) -> None:
        amounts = lease.held.setdefault(place, [0, 0, 0])
        amounts[kind] += size
        lease.version += 1
        self.lent[place] += size
        if amounts[kind] < 0 or self.lent[place] < 0:
            raise LedgerError(f"{lease.id} would hold less than nothing at {place}")
