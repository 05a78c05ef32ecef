"""The agent: one node's memory, its borrowers and its policy, wired together on one event loop."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ema_agent import pairs
from ema_agent.admission import Admission
from ema_agent.backing import Backing
from ema_agent.cleaner import Cleaner
from ema_agent.door import Door
from ema_agent.figures import Figures
from ema_agent.gates import Gates
from ema_agent.health import Health
from ema_agent.lanes import Lanes
from ema_agent.lease import Lease, Region
from ema_agent.ledger import Ledger
from ema_agent.listener import Reclaim
from ema_agent.losses import Losses
from ema_agent.node import Node
from ema_agent.pools import Pools
from ema_agent.steward import Steward
from ema_agent.watch import OLD, Watch
from ema_core import wire
from ema_core.api import MemoryPool
from ema_core.ids import HOST, GpuId
from ema_core.plan import Plan
from ema_driver.errors import DriverError
from ema_driver.protocol import MemoryDriver

TICK: Final = 0.05
"""Seconds between two looks at what only time changes: deadlines, minHold, queue positions, health."""
POLL: Final = 0.5
"""Seconds between two looks at which devices there are."""
RETEST: Final = 30.0
"""Seconds between two tests of barred pairs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How an agent is started."""

    driver: str
    endpoint: str
    """Where a child process finds the driver; empty for one that needs no such thing."""
    folder: Path
    client_mode: int = 0o600
    """Permissions of the socket that clients connect to."""
    pair_limit: float = pairs.LIMIT
    loopback: bool = False
    """See `Node.loopback`."""


class Agent:
    """Everything of one node. `run` serves until `stop` is called or the driver session is lost."""

    def __init__(self, driver: MemoryDriver, pools: Sequence[MemoryPool], setup: Setup) -> None:
        self.driver, self.setup = driver, setup
        self.node = Node(driver, loopback=setup.loopback)
        self.node.discover()
        self.ledger = Ledger()
        self.figures = Figures()
        self.health = Health()
        home = next(iter(self.node.devices))
        self.gates = Gates(driver)
        self.backing = Backing(driver, self.gates, home)
        self.steward = Steward(self.node, self.ledger, self.backing, self)
        self.losses = Losses(self.node, self.ledger, self.gates, self.steward, self.lost)
        self.ready = False
        self.why_ended: str | None = None
        self._changed = False
        """Memory has been read that is not as it was when the last plan was made."""
        self._end = asyncio.Event()
        self.lanes = Lanes(time.monotonic, asyncio.get_running_loop().call_later)
        self.cleaner = Cleaner(self.steward, self.lanes)
        self.pools = Pools(driver, self.steward, self.lanes)
        self.pools.use(pools)
        self.admission = Admission(driver, self.steward, self.lanes, self.pools)
        self.sessions = self.admission.sessions
        self.watch = Watch(driver, self.node, self._fresh, self.fail)
        self.steward.moves.held_changed = self.watch.look_now
        self.steward.may_grant = lambda: self.watch.age <= OLD
        self.steward.work.failed = lambda error: self.fail(f"internal error: {error!r}")

    # --- life ---

    async def run(self) -> None:
        """Verify the paths, open the door, serve; give everything back at the end."""
        await self._verify()
        self.watch.start()
        door = Door(self.setup.folder / "client.sock", self.setup.client_mode, self.admission.introduce)
        self.ready = True
        loops = [asyncio.ensure_future(c) for c in (self.steward.run(), self.cleaner.run(), self._tick(), self._poll())]
        try:
            await asyncio.wait([asyncio.ensure_future(self._end.wait()), *loops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ready = False
            door.close()
            for task in loops:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    self.why_ended = f"internal error: {error!r}"
            await self._give_back(loops)
        for task in loops:
            if not task.cancelled():
                task.result()

    def stop(self) -> None:
        """End in good order."""
        self._end.set()

    def fail(self, why: str) -> None:
        """The driver session is lost for good: end, so that whoever started this process starts it anew."""
        self.why_ended = why
        self._end.set()

    async def _give_back(self, loops: Sequence["asyncio.Future[None]"]) -> None:
        for session in list(self.sessions.values()):
            session.line.connection.close("the agent ends")
        deadline = time.monotonic() + 15.0
        while self.sessions and self.why_ended is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        self.watch.stop()
        if self.why_ended is None:
            await self.steward.work.stop()
            self.backing.stock.trim(0)
            self.gates.close_pages()

    # --- loops ---

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            for session in [s for s in self.sessions.values() if s.regions.waiters or s.share.waiters]:
                session.look(now)
            if self._changed or now >= self.steward.due:
                self._changed = False
                self.steward.wake()
            self._hear(now)
            await asyncio.sleep(TICK)

    def _fresh(self) -> bool:
        """A new reading of memory has come. True if the next one matters even if it is the same."""
        self._changed = True
        now = time.monotonic()
        short = False
        for gpu, pool_headroom in self.pools.headrooms().items():
            if self.ledger.lent[gpu] > 0 and self.node.free(gpu) < pool_headroom:
                self.figures.shortfall(gpu, now)
                short = True
            else:
                self.figures.no_shortfall(gpu, now)
        waiting = [s for s in self.sessions.values() if s.share.waiters]
        if short or waiting:
            self.steward.wake()
        for session in waiting:
            session.look(now)
        return short or bool(waiting)

    def _hear(self, now: float) -> None:
        try:
            events = self.driver.health()
        except DriverError:
            return
        for gpu in self.health.report(events, now):
            self.losses.lose(gpu, self.health.verdicts[gpu])
        if events or self.node.unhealthy:
            for gpu in self.health.clear(tuple(self.node.devices), now):
                self.node.lost.pop(gpu, None)
            self.node.unhealthy = dict(self.health.verdicts)
            self.steward.wake()
        if self.node.lost:
            self.losses.sweep()
            self._end_broken()

    async def _poll(self) -> None:
        tested = time.monotonic()
        while True:
            await asyncio.sleep(POLL)
            known = tuple(self.node.devices)
            try:
                present = [d.id for d in await self.steward.work.in_thread(self.driver.devices)]
            except DriverError:
                continue
            now = time.monotonic()
            for gpu in self.health.seen(known, present, now):
                self.node.unhealthy = dict(self.health.verdicts)
                self.losses.lose(gpu, self.health.verdicts[gpu])
            if now - tested > RETEST and self.node.barred:
                tested = now
                await self._verify(only_barred=True)

    async def _verify(self, *, only_barred: bool = False) -> None:
        links = [k for k in self.driver.links() if k.source != k.target]
        links = [k for k in links if not only_barred or (k.source, k.target) in self.node.barred]
        setup = self.setup
        for verdict in await pairs.verify(setup.driver, setup.endpoint, links, setup.pair_limit):
            pair = verdict.source, verdict.target
            if verdict.why:
                self.node.barred[pair] = verdict.why
                self.node.paths.pop(pair, None)
            else:
                self.node.barred.pop(pair, None)
                self.node.paths[pair] = verdict.rate
        self.node.observe()
        self.steward.wake()

    def _end_broken(self) -> None:
        """A copy was under way when its GPU went, and with it went the client's whole queue: it must begin anew."""
        for session in list(self.sessions.values()):
            if not session.closing and (broken := session.broken()):
                session.line.connection.close(f"its copies ended with the GPU: {broken}")

    # --- what the steward tells ---

    def moved(self, lease: Lease, region: Region, size: int) -> None:
        """Tell the client what its region is fetched at now."""
        self.figures.moved(lease.pool, size)
        if (session := self.sessions.get(lease.id)) is not None:
            session.regions.tell_rate(region, size)

    def dropped(self, lease: Lease, region: Region, chunks: Sequence[int]) -> None:
        """Write the client's notice word, then tell it."""
        drops = lease.drops[region.number] = lease.drops.get(region.number, 0) + 1
        if (session := self.sessions.get(lease.id)) is not None:
            session.notice.store(wire.NOTICE_REGIONS + region.number, drops & 0xFFFFFFFF)
            session.line.tell(wire.Dropped(0, region.number, list(chunks[:1024])))

    def lost(self, lease: Lease, region: Region, chunks: Sequence[int], cause: str) -> None:
        """Tell the client which bytes it must not use; their gates stay closed."""
        self.figures.lost(lease.pool, len(chunks) * lease.chunk)
        if (session := self.sessions.get(lease.id)) is not None:
            session.copies.lose()
            session.line.send(wire.Lost(region.number, list(chunks), cause))

    def granted(self, lease: Lease, region: Region) -> None:
        """A promise was kept."""
        if (session := self.sessions.get(lease.id)) is not None:
            session.regions.granted(region)

    def reclaimed(self, record: Reclaim) -> None:
        """Count it."""
        self.figures.reclaimed(record)

    def planned(self, outcome: Plan, seconds: float) -> None:
        """Count it; whoever waits hears where it stands."""
        self.figures.planned(outcome, seconds)

    # --- what others ask ---

    @property
    def trouble(self) -> str:
        """Why this agent cannot serve just now; empty if it can."""
        if not self.ready:
            return "it is starting or ending"
        if self.watch.age > OLD:
            return f"the driver has not answered a memory query for {self.watch.age:.1f} s"
        return ""

    def drain(self, gpu: GpuId, *, undo: bool = False) -> int:
        """Empty a GPU (or stop to); bytes still lent from it."""
        if undo:
            self.node.draining.discard(gpu)
        else:
            self.node.draining.add(gpu)
        self.steward.wake()
        return self.ledger.lent[gpu]

    @property
    def host_bytes(self) -> int:
        """Host memory that we hold: chunks, their copies, and spare pieces."""
        twins = sum(c.size for c in self.ledger.chunks() if c.twin is not None)
        return self.ledger.lent[HOST] + twins + self.backing.stock.spare_bytes
