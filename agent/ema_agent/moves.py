"""Moves and drops: bytes leave the place where they are, and the ledger follows them.

A chunk on its way counts where it will be. Whatever fails, a chunk ends where its bytes are and with its gate open; or,
if no memory can be mapped behind its address, lost with its gate closed, and its owner is told.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ema_agent.backing import Backing, Held, Stuck
from ema_agent.lease import Chunk, Lease, Region, State
from ema_agent.ledger import Ledger
from ema_agent.listener import Listener, Reclaim
from ema_agent.node import Node
from ema_agent.work import Work
from ema_core.ids import HOST, LeaseId, Place
from ema_core.plan import Cause, Drop, Move
from ema_driver.errors import DriverError, OutOfMemory

BATCH: Final = 8
"""Chunks of one dirty batch: the lender sees bytes come back while the rest is still copied."""
ABREAST: Final = 2
"""Dirty batches of one move at once: the link never waits while memory is taken for the next batch and given back."""

LANDING: Final = 2.0
"""Seconds for which mapping a chunk is tried again before it is given up; its copies wait at its gate meanwhile."""
PAUSE: Final = 0.02
"""Seconds between two tries."""


class Moves:
    """Carries out a plan's moves and drops. Belongs to the agent's loop."""

    def __init__(
        self, node: Node, ledger: Ledger, backing: Backing, *, work: Work, listener: Listener, wake: Callable[[], None]
    ) -> None:
        self._node, self._ledger, self._backing = node, ledger, backing
        self._work, self._listener, self._wake = work, listener, wake
        self.held_changed: Callable[[], None] = lambda: None
        """Called when bytes were taken or given back, from any thread, so that memory is read again at once."""
        self.passed_over = False
        """The last plan wanted chunks that a worker thread was copying just then: plan again when that ends."""
        self.spare_limit = 0
        """Bytes of host memory that are kept for the next chunk."""

    # --- moves: one after the other, as a chunk sees them ---

    def begin(self, moves: Iterable[Move], now: float) -> None:
        """Start a plan's moves, in its order."""
        self.passed_over = False
        for move in moves:
            if move.source in self._node.resting or move.target in self._node.resting:
                continue
            if self._ends(move.lease):
                continue
            chunks = self._ledger.pick(move.lease, move.source, move.size, droppable=move.droppable)
            if move.source in self._node.lost:
                # Nothing can be copied from there: the others are lost, which is not for a plan to decide.
                chunks = [c for c in chunks if c.has_true_twin]
            self.passed_over |= sum(c.size for c in chunks) < move.size
            if not chunks:
                continue
            if move.cause is Cause.PROMOTE:
                chunks[0].lease.granted_at = now
            elif move.target == HOST:
                chunks[0].lease.reclaimed_at = now
            clean = [c for c in chunks if c.state is State.CLEAN]
            dirty = [c for c in chunks if c.state is not State.CLEAN]
            self._ledger.become_all(chunks, State.MOVING, place=move.target)
            self._work.start(self._relocate(clean, dirty, move, now), move.source)

    def _ends(self, lease: LeaseId) -> bool:
        """Whether a lease's chunks are given back anyway: a chunk that is taken again and again would hold that up."""
        entry = self._ledger.leases.get(lease)
        return entry is None or entry.closing

    async def _relocate(self, clean: list[Chunk], dirty: list[Chunk], move: Move, decided: float) -> None:
        node = self._node
        if clean:
            # The twin is there already: the lender has its bytes back before anything is copied.
            try:
                with node.changing({move.source}):
                    freed, stored, taken, free_from = await self._work.in_thread(self._vacate, clean)
                    node.held(move.source, -sum(c.size for c in freed))
                # Only a reading from now on shows the lender its bytes; mapping the twins must not hold it up.
                self.held_changed()
            except DriverError as error:
                self._failed_move([*clean, *dirty], move, move.source, error)
                return
            self._record(move, freed, (taken - decided, free_from - decided), clean=True)
            landed = await self._land(freed)
            dirty = stored + dirty
            if move.target == HOST:
                self._arrived(landed, State.HOST, HOST)
            else:
                await self._carry(landed, move, HOST)
        batches = iter([dirty[first : first + BATCH] for first in range(0, len(dirty), BATCH)])
        await asyncio.gather(*(self._carry_all(batches, move, decided) for _ in range(ABREAST)))
        await self.trim()

    def _vacate(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk], float, float]:
        """On a worker: chunks whose memory is free, as their twin is true, and those that a store made dirty again.

        And the moments when they were taken and from which it is free. Gates of the first are closed still, those of
        the others are open.
        """
        backing = self._backing
        backing.take(chunks)
        true: list[Chunk] = []
        untrue: list[Chunk] = []
        for c in chunks:
            (untrue if c.twin is None or c.gate.dirty else true).append(c)
        taken = time.monotonic()
        try:
            free_from = backing.vacate(true) if true else taken
        finally:
            backing.gates.open([c.gate for c in chunks if c.mapped])
        return true, untrue, taken, free_from

    async def _land(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Map what is not mapped, and open its gate; those that are there at last. The others are lost."""
        away, end = [c for c in chunks if not c.mapped], time.monotonic() + LANDING
        while away:
            why = await self._work.in_thread(self._appear, away)
            away = [c for c in away if not c.mapped]
            if why is not None and time.monotonic() >= end:
                await self._give_up(away, str(why))
                return [c for c in chunks if c.mapped]
            if away:
                await asyncio.sleep(PAUSE)
        return list(chunks)

    def _appear(self, chunks: list[Chunk]) -> DriverError | None:
        """On a worker: map chunks, and open the gates of those that are mapped; what kept the others from it."""
        why = self._backing.appear(chunks)
        self._backing.gates.open([c.gate for c in chunks if c.mapped])
        return why

    async def _carry_all(self, batches: Iterator[list[Chunk]], move: Move, decided: float) -> None:
        for batch in batches:
            if (times := await self._carry(batch, move, move.source)) is not None:
                self._record(move, batch, (times[0] - decided, times[1] - decided), clean=False)

    async def _carry(self, batch: list[Chunk], move: Move, source: Place) -> tuple[float, float] | None:
        """Copy a batch to the target; on failure it stays, or goes, where it is safe.

        The moments when it was taken and from which the memory that it left is free, or None if it did not arrive.
        """
        if not batch:
            return None
        try:
            with self._node.changing({source, move.target}):
                times = await self._work.in_thread(self._copy, batch, self._way(source, move.target))
                self.held(source, -sum(c.size for c in batch))
                self.held(move.target, sum(c.size for c in batch))
        except DriverError as error:
            if source != HOST and batch[0].handle.place == HOST:  # it got as far as there
                self.held(source, -sum(c.size for c in batch))
                source = HOST
            if landed := await self._land(batch):
                self._failed_move(landed, move, source, error)
            return None
        if move.target == HOST:
            self._arrived(batch, State.HOST, HOST)
        else:
            twins = [c.has_true_twin for c in batch]  # a store may change it meanwhile, to the safe side
            self._arrived([c for c, true in zip(batch, twins, strict=True) if true], State.CLEAN, move.target)
            self._arrived([c for c, true in zip(batch, twins, strict=True) if not true], State.DIRTY, move.target)
        return times

    def _way(self, source: Place, target: Place) -> tuple[Place, ...]:
        """Straight, or by host memory where that pair is barred: every lender has a true way to and from there."""
        return (target,) if HOST in (source, target) or (source, target) in self._node.paths else (HOST, target)

    def _copy(self, batch: list[Chunk], way: Sequence[Place]) -> tuple[float, float]:
        """On a worker: the moments when the batch was taken and from which the memory that it left is free."""
        backing = self._backing
        backing.take(batch)
        taken = time.monotonic()
        try:
            free_from, *_ = [backing.copy_to(batch, target) for target in way]
            return taken, free_from
        finally:
            backing.gates.open([c.gate for c in batch if c.mapped])

    def _arrived(self, chunks: Sequence[Chunk], state: State, place: Place) -> None:
        self._ledger.become_all(chunks, state, place=place)
        sizes: dict[tuple[Lease, Region], int] = defaultdict(int)
        for c in chunks:
            sizes[c.lease, c.region] += c.size
        for (lease, region), size in sizes.items():
            self._listener.moved(lease, region, size)

    def _record(self, move: Move, chunks: Sequence[Chunk], times: tuple[float, float], *, clean: bool) -> None:
        if chunks and move.cause is not Cause.PROMOTE:
            size = sum(c.size for c in chunks)
            own, seconds = times
            self._listener.reclaimed(
                Reclaim(
                    *(move.lease, move.source, move.target, size, move.cause),
                    clean=clean,
                    seconds=seconds,
                    own_seconds=own,
                )
            )

    # --- failures ---

    def _failed_move(self, chunks: list[Chunk], move: Move, source: Place, error: DriverError) -> None:
        """The target filled up or went away, or a link hangs. The bytes are where they were; the next plan sees why."""
        if isinstance(error, Stuck):
            self._bar(source, move.target, error)
        elif isinstance(error, Held):
            self._bar(source, chunks[0].lease.gpu, error)
        else:
            self._rest(error, source, move.target)
        self._stay(chunks, source)

    def _bar(self, source: Place, target: Place, why: DriverError) -> None:
        self._node.barred[source, target] = str(why)
        self._node.paths.pop((source, target), None)

    def _rest(self, error: DriverError, source: Place, target: Place) -> None:
        """After a failure: whichever end is to blame is left alone for a moment."""
        self._node.rest(target if isinstance(error, OutOfMemory) else source)

    def _kept(self, chunks: Sequence[Chunk], error: DriverError) -> None:
        """Chunks that were to be dropped are as they were."""
        self._rest(error, chunks[0].place, chunks[0].place)
        self._stay(chunks, chunks[0].place)

    def _stay(self, chunks: Sequence[Chunk], place: Place) -> None:
        """Chunks that were to leave are where they were."""
        self._ledger.become_all(chunks, State.HOST if place == HOST else State.DIRTY, place=place)
        self._wake()

    async def _give_up(self, chunks: list[Chunk], why: str) -> None:
        places = {c.handle.place for c in chunks}
        with self._node.changing(places):
            await self._work.in_thread(self._backing.forget, chunks)
            for c in chunks:
                self.held(c.handle.place, -c.size)
        self._ledger.become_all(chunks, State.LOST)
        by_region: dict[Region, list[int]] = defaultdict(list)
        for c in chunks:
            by_region[c.region].append(c.index)
        for region, indices in by_region.items():
            self._listener.lost(chunks[0].lease, region, indices, why)
        self._wake()

    # --- drops ---

    def begin_drops(self, drops: Iterable[Drop], now: float) -> None:
        """Start a plan's drops."""
        for drop in drops:
            if drop.place not in self._node.resting and not self._ends(drop.lease):
                self.drop(self._ledger.pick(drop.lease, drop.place, drop.size, droppable=True), drop.cause, now)

    def drop(self, chunks: list[Chunk], cause: Cause, now: float) -> None:
        """Give up droppable chunks of one lease at one place."""
        if chunks:
            chunks[0].lease.reclaimed_at = now
            self._ledger.become_all(chunks, State.MOVING)
            self._work.start(self._drop(chunks, cause, now), chunks[0].place)

    async def _drop(self, chunks: list[Chunk], cause: Cause, decided: float) -> None:
        lease, place = chunks[0].lease, chunks[0].place
        try:
            await self._work.in_thread(self._backing.take, chunks)
        except DriverError as error:
            self._kept(chunks, error)
            return
        taken = free_from = time.monotonic()
        try:
            with self._node.changing({place}):
                try:
                    free_from = await self._work.in_thread(self._backing.to_scratch, chunks, lease.id)
                finally:
                    self.held(place, -sum(c.size for c in chunks if c.handle.place != place))
        except DriverError as error:
            if chunks[0].mapped:
                self._backing.gates.open([c.gate for c in chunks])
                self._kept(chunks, error)
                return
        by_region: dict[int, list[int]] = defaultdict(list)
        self._ledger.become_all(chunks, State.DROPPED)
        for c in chunks:
            by_region[c.region.number].append(c.index)
        # The client's notice word is written before a gate opens: whoever reads scratch can know it.
        for number, indices in by_region.items():
            self._listener.dropped(lease, lease.regions[number], indices)
        self._backing.gates.open([c.gate for c in chunks if c.mapped])
        if away := [c for c in chunks if not c.mapped]:
            for c in away:
                c.busy = True  # a renewal must not give it back meanwhile
            try:
                await self._land(away)
            finally:
                for c in away:
                    c.busy = False
        size = sum(c.size for c in chunks)
        self._listener.reclaimed(
            Reclaim(
                *(lease.id, place, None, size, cause),
                clean=True,
                seconds=free_from - decided,
                own_seconds=taken - decided,
            )
        )

    # --- what is held ---

    def held(self, place: Place, size: int) -> None:
        """We hold so many bytes more at a place, or less."""
        self._node.held(place, size)
        self.held_changed()

    async def trim(self) -> None:
        """Give host memory back that is kept for the next chunk, beyond the limit."""
        keep = 0 if HOST in self._node.draining else self.spare_limit
        if self._backing.stock.spare_bytes > keep:
            await self._work.in_thread(self._backing.stock.trim, keep)
