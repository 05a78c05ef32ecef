"""The steward carries plans out: it looks at the node, asks the policy, and moves memory until nothing is left to do.

It runs on the agent's loop and owns the ledger; driver work goes to worker threads (`backing`). Chunks on their way
count where they will be, and granted chunks count before their memory is made, so planning again in the middle is
always right.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from ema_agent.backing import Backing, Held, Stuck
from ema_agent.ledger import Chunk, Lease, Ledger, Region, State
from ema_agent.node import Node
from ema_core.ids import HOST, LeaseId, Place, PoolName
from ema_core.plan import Cause, Drop, Grant, Move, Plan, Waiting
from ema_core.policy import plan
from ema_core.state import Gpu, NodeState, PoolPolicy
from ema_driver.errors import DriverError, OutOfMemory

T = TypeVar("T")
BATCH: Final = 8
"""Chunks of one dirty batch: the lender sees bytes come back while the rest is still copied."""
WORKERS: Final = 4
INF: Final = float("inf")
REST: Final = 0.1
"""Seconds for which a place that failed is left alone, so that a failure that lasts does not become a busy loop."""

OWN_CAUSES: Final = frozenset({Cause.HEADROOM, Cause.LIMIT, Cause.DRAIN, Cause.HEALTH})
"""Causes on the lender's side: their duration is a promise to the lender."""


class Listener(Protocol):
    """Who hears what happened to leases: the sessions and the metrics."""

    def moved(self, lease: Lease, region: Region, size: int) -> None:
        """Bytes of a region changed place."""

    def dropped(self, lease: Lease, region: Region, chunks: Sequence[int]) -> None:
        """Chunks are about to be dropped; called while their gates are still closed."""

    def lost(self, lease: Lease, region: Region, chunks: Sequence[int], cause: str) -> None:
        """Chunks are gone with their GPU; their gates stay closed."""

    def granted(self, lease: Lease, region: Region) -> None:
        """The memory of a promise has arrived."""

    def reclaimed(self, record: "Reclaim") -> None:
        """Bytes were taken from where they were."""

    def planned(self, outcome: Plan, seconds: float) -> None:
        """A plan was made."""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """One batch that was taken from a place."""

    lease: LeaseId
    source: Place
    target: Place | None
    """None: dropped."""
    size: int
    cause: Cause
    clean: bool
    seconds: float
    """From the decision until the driver had the bytes back."""


class Steward:
    """Plans and carries out."""

    def __init__(self, node: Node, ledger: Ledger, backing: Backing, listener: Listener) -> None:
        self.node, self.ledger, self.backing, self.listener = node, ledger, backing, listener
        self.pools: dict[PoolName, PoolPolicy] = {}
        self.waiting: dict[LeaseId, Waiting] = {}
        self.entitlement: dict[LeaseId, int] = {}
        self.overdue: dict[tuple[LeaseId, Place], int] = {}
        self._wake = asyncio.Event()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="ema-move")
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[Place, set[asyncio.Task[None]]] = defaultdict(set)
        self.held_changed: Callable[[], None] = lambda: None
        """Called when bytes were taken or given back, from any thread, so that memory is read again at once."""
        self.failed: Callable[[BaseException], None] = _raise
        """Called on the loop with what no piece of work may raise: the ledger is right no more."""
        self.may_grant: Callable[[], bool] = lambda: True
        """Whether what is known of the node is fresh enough to lend by."""
        self._resting: dict[Place, float] = {}
        """Place → until when it is left alone."""
        self.passed_over = False
        """The last plan wanted chunks that a worker thread was copying just then: plan again when that ends."""
        self.due = INF
        """When a plan can differ although nothing has happened: a `minHold` or a rest ends. Monotonic seconds."""
        self.settled = asyncio.Event()
        """Set whenever a plan found nothing to do and nothing is under way."""

    def wake(self) -> None:
        """Something changed: plan soon."""
        self.settled.clear()
        self._wake.set()

    async def run(self) -> None:
        """Plan whenever woken, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.round().empty and not self._tasks and not self._wake.is_set():
                self.settled.set()

    async def stop(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._workers.shutdown(wait=True)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking driver work on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, lambda: work(*args))

    def state(self) -> NodeState:
        """The node at this moment."""
        now = time.monotonic()
        self._resting = {p: end for p, end in self._resting.items() if end > now}
        return NodeState(
            gpus=tuple(self._full(g) if g.id in self._resting else g for g in self.node.gpus()),
            paths=dict(self.node.paths),
            leases=self.ledger.policy_leases(),
            draining=frozenset(self.node.draining),
        )

    def _full(self, gpu: Gpu) -> Gpu:
        """A resting GPU as one that keeps what it lends and has nothing more to lend."""
        headroom = max((p.headroom for p in self.pools.values() if gpu.id in p.gpus), default=0)
        most = gpu.total - gpu.reserved - headroom - self.ledger.lent[gpu.id]
        return Gpu(gpu.id, gpu.total, gpu.reserved, max(gpu.used, most), gpu.lends, gpu.healthy)

    def _rest(self, error: DriverError, source: Place, target: Place) -> None:
        """After a failure: whichever end is to blame is left alone for a moment."""
        full = isinstance(error, OutOfMemory)
        self._resting[target if full else source] = time.monotonic() + REST

    def round(self) -> Plan:
        """Plan once and start carrying it out."""
        now = time.monotonic()
        outcome = plan(self.state(), tuple(self.pools.values()), now)
        self.listener.planned(outcome, time.monotonic() - now)
        self.waiting = {w.lease: w for w in outcome.waiting}
        self.entitlement = dict(outcome.entitlement or {})
        self.overdue = {(o.lease, o.place): o.size for o in outcome.overdue}
        self._start_moves(outcome.moves, now)
        self._start_drops(outcome.drops, now)
        self._start_grants(outcome.grants, now)
        ends = (at for lease in self.ledger.leases.values() for at in self._ends(lease) if at > now)
        self.due = min(*ends, *self._resting.values(), INF, INF)
        return outcome

    def _ends(self, lease: Lease) -> tuple[float, float]:
        """When the two holds of a lease end; a moment later, so that a plan then surely finds them ended."""
        hold = self.pools[lease.pool].min_hold + 1e-3
        return lease.granted_at + hold, lease.reclaimed_at + hold

    # --- moves ---

    def _start_moves(self, moves: Iterable[Move], now: float) -> None:
        self.passed_over = False
        for move in moves:
            if move.source in self._resting or move.target in self._resting:
                continue
            chunks = self.ledger.pick(move.lease, move.source, move.size, droppable=move.droppable)
            self.passed_over |= sum(c.size for c in chunks) < move.size
            if not chunks:
                continue
            if move.cause is not Cause.PROMOTE:
                chunks[0].lease.reclaimed_at = now
            clean = [c for c in chunks if c.state is State.CLEAN]
            dirty = [c for c in chunks if c.state is not State.CLEAN]
            self.ledger.become_all(chunks, State.MOVING, place=move.target)
            self._start(move.source, self._relocate(clean, dirty, move, now))

    async def _relocate(self, clean: list[Chunk], dirty: list[Chunk], move: Move, decided: float) -> None:
        node = self.node
        if clean:
            # The twin is there already: the lender has its bytes back before anything is copied.
            try:
                with node.changing({move.source}):
                    freed, stored, free_from = await self.in_thread(self._to_twin, clean)
                    self._held(move.source, -sum(c.size for c in freed))
            except DriverError as error:
                self._failed_move([*clean, *dirty], move, move.source, error)
                return
            self._record(move, freed, free_from - decided, clean=True)
            dirty = stored + dirty
            if move.target == HOST:
                self._arrived(freed, State.HOST, HOST)
            else:
                await self._carry(freed, move, HOST)
        for first in range(0, len(dirty), BATCH):
            batch = dirty[first : first + BATCH]
            if (left_at := await self._carry(batch, move, move.source)) is not None:
                self._record(move, batch, left_at - decided, clean=False)
        await self.trim()

    def _to_twin(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk], float]:
        """On a worker: chunks that went to their twin, and those that a store had made dirty again (gates open).

        And the moment from which the memory of the first is free.
        """
        backing = self.backing
        backing.take(chunks)
        true: list[Chunk] = []
        untrue: list[Chunk] = []
        for c in chunks:
            (untrue if c.twin is None or c.gate.dirty else true).append(c)
        free_from = time.monotonic()
        if true:
            free_from = backing.vacate(true)
            self.held_changed()
            backing.to_twin(true)
        backing.gates.open([c.gate for c in chunks])
        return true, untrue, free_from

    async def _carry(self, batch: list[Chunk], move: Move, source: Place) -> float | None:
        """Copy a batch to the target; on failure it stays, or goes, where it is safe.

        The moment from which the memory that it left is free, or None if it did not arrive.
        """
        if not batch:
            return None
        try:
            with self.node.changing({source, move.target}):
                free_from = await self.in_thread(self._copy, batch, self._way(source, move.target))
                self._held(source, -sum(c.size for c in batch))
                self._held(move.target, sum(c.size for c in batch))
        except DriverError as error:
            if source != HOST and batch[0].handle.place == HOST:  # it got as far as there
                self._held(source, -sum(c.size for c in batch))
                source = HOST
            self._failed_move(batch, move, source, error)
            return None
        if move.target == HOST:
            self._arrived(batch, State.HOST, HOST)
        else:
            twins = [c.has_true_twin for c in batch]  # a store may change it meanwhile, to the safe side
            self._arrived([c for c, true in zip(batch, twins, strict=True) if true], State.CLEAN, move.target)
            self._arrived([c for c, true in zip(batch, twins, strict=True) if not true], State.DIRTY, move.target)
        return free_from

    def _failed_move(self, chunks: list[Chunk], move: Move, source: Place, error: DriverError) -> None:
        """The target filled up or went away, or a link hangs. The bytes are where they were; the next plan sees why."""
        if isinstance(error, Stuck):
            self._bar(source, move.target, error)
        elif isinstance(error, Held):
            self._bar(source, chunks[0].lease.gpu, error)
        else:
            self._rest(error, source, move.target)
        self._stay(chunks, source)

    def _stay(self, chunks: Sequence[Chunk], place: Place) -> None:
        """Chunks that were to leave are where they were."""
        self.ledger.become_all(chunks, State.HOST if place == HOST else State.DIRTY, place=place)
        self.wake()

    def _bar(self, source: Place, target: Place, why: DriverError) -> None:
        self.node.barred[source, target] = str(why)
        self.node.paths.pop((source, target), None)

    def _way(self, source: Place, target: Place) -> tuple[Place, ...]:
        """Straight, or by host memory where that pair is barred: every lender has a true way to and from there."""
        return (target,) if HOST in (source, target) or (source, target) in self.node.paths else (HOST, target)

    def _copy(self, batch: list[Chunk], way: Sequence[Place]) -> float:
        """On a worker: the moment from which the memory that the batch left is free."""
        backing = self.backing
        backing.take(batch)
        try:
            free_from, *_ = [backing.copy_to(batch, target) for target in way]
            return free_from
        finally:
            backing.gates.open([c.gate for c in batch])

    def _arrived(self, chunks: Sequence[Chunk], state: State, place: Place) -> None:
        self.ledger.become_all(chunks, state, place=place)
        sizes: dict[tuple[Lease, Region], int] = defaultdict(int)
        for c in chunks:
            sizes[c.lease, c.region] += c.size
        for (lease, region), size in sizes.items():
            self.listener.moved(lease, region, size)

    # --- drops ---

    def _start_drops(self, drops: Iterable[Drop], now: float) -> None:
        for drop in drops:
            if drop.place not in self._resting:
                self.drop(self.ledger.pick(drop.lease, drop.place, drop.size, droppable=True), drop.cause, now)

    def drop(self, chunks: list[Chunk], cause: Cause, now: float) -> None:
        """Give up droppable chunks of one lease at one place."""
        if chunks:
            chunks[0].lease.reclaimed_at = now
            self.ledger.become_all(chunks, State.MOVING)
            self._start(chunks[0].place, self._drop(chunks, cause, now))

    async def _drop(self, chunks: list[Chunk], cause: Cause, decided: float) -> None:
        lease, place = chunks[0].lease, chunks[0].place
        try:
            await self.in_thread(self.backing.take, chunks)
            with self.node.changing({place}):
                free_from = await self.in_thread(self.backing.to_scratch, chunks, lease.id)
                self._held(place, -sum(c.size for c in chunks))
        except DriverError as error:
            self.backing.gates.open([c.gate for c in chunks])
            self._rest(error, place, place)
            self._stay(chunks, place)
            return
        by_region: dict[int, list[int]] = defaultdict(list)
        self.ledger.become_all(chunks, State.DROPPED)
        for c in chunks:
            by_region[c.region.number].append(c.index)
        # The client's notice word is written before the gate opens: whoever reads scratch can know it.
        for number, indices in by_region.items():
            self.listener.dropped(lease, lease.regions[number], indices)
        self.backing.gates.open([c.gate for c in chunks])
        size = sum(c.size for c in chunks)
        seconds = free_from - decided
        self.listener.reclaimed(Reclaim(lease.id, place, None, size, cause, clean=True, seconds=seconds))

    # --- grants ---

    def _start_grants(self, grants: Iterable[Grant], now: float) -> None:
        if not self.may_grant():
            return
        for grant in grants:
            lease = self.ledger.leases.get(grant.lease)
            if lease is None or grant.place in self._resting:
                continue
            count = grant.size // lease.chunk
            wanted = [w for w, _ in zip(lease.missing(droppable=grant.droppable), range(count), strict=False)]
            for region, index in wanted:
                self.ledger.promise(lease, region, index, grant.place)
            if wanted:
                lease.granted_at = now
                self._start(None, self._grant(lease, wanted, grant.place))

    async def _grant(self, lease: Lease, wanted: list[tuple[Region, int]], place: Place) -> None:
        leaving = [t for t in self._leaving[place] if t is not asyncio.current_task()]
        if leaving:
            await asyncio.wait(leaving)
        try:
            with self.node.changing({place}):
                fresh = await self.in_thread(self.backing.fresh, place, lease.chunk, len(wanted))
                self._held(place, lease.chunk * len(wanted))
        except DriverError:
            self._resting[place] = time.monotonic() + REST
            for region, index in wanted:
                self.ledger.withdraw(lease, region, index)
            self.wake()
            return
        unwanted = []
        for (region, index), f in zip(wanted, fresh, strict=True):
            if region.promised.get(index) == place:
                self.ledger.arrive(lease, region, index, address=f.address, gate=f.gate, handle=f.handle)
            else:
                unwanted.append(f)
        if unwanted:
            with self.node.changing({place}):
                await self.in_thread(self.backing.discard, unwanted)
                self._held(place, -lease.chunk * len(unwanted))
        for region in {id(r): r for r, _ in wanted}.values():
            self.listener.granted(lease, region)

    # --- inside ---

    def _start(self, leaving: Place | None, work: "asyncio.Future[None] | object") -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        if leaving is not None:
            self._leaving[leaving].add(task)
        task.add_done_callback(lambda t: self._ended(t, leaving))

    def _ended(self, task: "asyncio.Task[None]", leaving: Place | None) -> None:
        self._tasks.discard(task)
        if leaving is not None:
            self._leaving[leaving].discard(task)
        self.wake()
        self.done(task)

    def done(self, task: "asyncio.Task[None]") -> None:
        """A piece of work on the ledger has ended: with what it may not raise, the agent has to end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def _held(self, place: Place, size: int) -> None:
        self.node.held(place, size)
        self.held_changed()

    def _record(self, move: Move, chunks: Sequence[Chunk], seconds: float, *, clean: bool) -> None:
        if chunks and move.cause is not Cause.PROMOTE:
            size = sum(c.size for c in chunks)
            record = Reclaim(move.lease, move.source, move.target, size, move.cause, clean=clean, seconds=seconds)
            self.listener.reclaimed(record)

    async def trim(self) -> None:
        """Give host memory back that is kept for the next chunk, beyond an eighth of what reclaims may use."""
        most = sum(p.host_spill for p in self.pools.values()) // 8
        if self.backing.spare_bytes > most:
            await self.in_thread(self.backing.trim, most)


def _raise(error: BaseException) -> None:
    raise error
