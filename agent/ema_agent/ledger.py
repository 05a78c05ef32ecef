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
from collections.abc import Collection, Iterable
from operator import attrgetter

from ema_agent.gates import Gate
from ema_agent.lease import GONE, Chunk, Lease, Region, State
from ema_core import state
from ema_core.ids import HOST, LeaseId, Place
from ema_driver.protocol import Address, Handle


class LedgerError(Exception):
    """A transition that the state machine does not have: a fault of the agent, never of a client."""


ALLOWED: dict[State, frozenset[State]] = {
    State.DIRTY: frozenset({State.CLEAN, State.MOVING, State.LOST}),
    State.CLEAN: frozenset({State.DIRTY, State.MOVING, State.LOST}),
    State.HOST: frozenset({State.MOVING}),
    State.MOVING: frozenset({State.DIRTY, State.CLEAN, State.HOST, State.DROPPED, State.LOST}),
    State.DROPPED: frozenset({State.LOST}),
    State.LOST: frozenset(),
}


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
