"""One client: its lease, its windows and programs, and what each of its messages does.

Follow one chunk: `GrowRegion` makes it wanted → the steward grants it (`steward._grant`) → `granted` answers the client →
`OpenProgram` builds copies around its gate (`programs`) → `Start` launches them → a plan moves it (`steward._relocate`) →
`moved` tells the client → `ShrinkRegion`, or the end of the session, gives it back.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from ema_agent.connection import Connection
from ema_agent.lanes import Lanes
from ema_agent.ledger import Chunk, Lease, Region, State
from ema_agent.node import Node
from ema_agent.programs import Copies, Program, Refusal, Window
from ema_agent.steward import Steward
from ema_core import wire
from ema_core.ids import Place
from ema_core.wire import Kinds
from ema_driver.errors import DriverError, InvalidUse
from ema_driver.protocol import MemoryDriver, Words

PENDING: Final = 64
"""Requests that one client may have unanswered."""
DRAIN: Final = 10.0
"""Seconds that a dead client's queued copies may take to pass."""
PAUSE: Final = 1e-3


class Waiter:
    """A request for growth that waits for grants."""

    def __init__(self, request: int, region: Region, before: int, deadline: float) -> None:
        self.request, self.region, self.before, self.deadline = request, region, before, deadline
        self.position = -1


class Session:
    """Handles one client's messages. Belongs to the agent's loop."""

    def __init__(
        self, driver: MemoryDriver, steward: Steward, lanes: Lanes, lease: Lease, ended: Callable[["Session"], None]
    ) -> None:
        self.lease = lease
        self.connection: Connection | None = None
        self.share_granted = 0
        self.share_mapped = 0
        self.closing = False
        self.waiters: list[Waiter] = []
        self._driver, self._steward, self._lanes = driver, steward, lanes
        self._ended = ended
        self._share_waiters: list[tuple[int, int, float]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.shared: Words = driver.words(wire.MAX_SLOTS * wire.SLOT_WORDS)
        self.notice: Words = driver.words(wire.NOTICE_WORDS)
        self._private: Words = driver.words(wire.RUN_WORDS)
        fetch, store = driver.stream(lease.gpu), driver.stream(lease.gpu)
        self.copies = Copies(lease, fetch, store, shared=self.shared, notice=self.notice, private=self._private)
        self.waited = self.stepped = 0.0
        self.steps = 0
        self._do: dict[type, Callable[..., None]] = {
            wire.Start: self._start,
            wire.Run: self._run,
            wire.GrowRegion: self._grow,
            wire.RenewRegion: self._renew,
            wire.ShrinkRegion: self._shrink,
            wire.AskDropped: self._ask_dropped,
            wire.OpenProgram: self._open_program,
            wire.CloseProgram: self._close_program,
            wire.OpenWindow: self._open_window,
            wire.CloseWindow: self._close_window,
            wire.GrowShare: self._grow_share,
            wire.ShareIs: self._share_is,
            wire.Report: self._report,
            wire.Goodbye: self._goodbye,
        }

    # --- in and out --------------------------------------------------------------------------------------------------

    def received(self, message: wire.ClientMessage, fds: list[int]) -> None:
        """One message of this client."""
        if self.closing:
            return
        do = self._do.get(type(message))
        try:
            if do is None:
                raise Refusal.bad("message", type(message).__name__, "Hello only once, first")
            if len(self._tasks) + len(self.waiters) + len(self._share_waiters) > PENDING:
                raise Refusal(Kinds.BUSY, f"{PENDING} requests are unanswered: wait for answers first")
            if type(message) is wire.OpenWindow:
                self._open_window(message, fds)
            else:
                do(message)
        except Refusal as refusal:
            self._refuse(getattr(message, "id", 0), refusal)

    def send(self, message: wire.AgentMessage, fds: Sequence[int] = ()) -> None:
        """Answer."""
        if self.connection is not None:
            self.connection.send(message, fds)

    def tell(self, message: wire.AgentMessage) -> None:
        """Send an event."""
        if self.connection is not None:
            self.connection.tell(message)

    def _refuse(self, request: int, why: Refusal) -> None:
        self.send(wire.Refused(request, why.kind, why.message, why.field, why.value, why.expected, why.position))

    def _later(self, request: int, work: Awaitable[int]) -> None:
        """Answer a request when its work has ended."""

        async def answer() -> None:
            try:
                self.send(wire.Done(request, await work))
            except Refusal as refusal:
                self._refuse(request, refusal)
            except DriverError as error:
                self._refuse(request, Refusal(Kinds.INTERNAL, f"the driver refused: {error}"))

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- copies ------------------------------------------------------------------------------------------------------

    def _start(self, message: wire.Start) -> None:
        program = self.copies.due(message)
        if program is None:
            self._steward.ledger.repeats += 1
            return
        now = time.monotonic()
        if not self._lanes.cap:
            self.copies.launch(program, message.seq, now)
            return
        sizes = {} if program.store else self._sizes(program)
        self._lanes.submit(self.lease.id, sizes, lambda: self.copies.launch(program, message.seq, time.monotonic()))

    def _run(self, message: wire.Run) -> None:
        if len(message.steps) > wire.MAX_COPIES:
            raise Refusal.bad("steps", len(message.steps), f"at most {wire.MAX_COPIES} copies")
        self.copies.run(message, time.monotonic())

    def _sizes(self, program: Program) -> dict[Place, int]:
        sizes: dict[Place, int] = {}
        share = program.size // max(1, len(program.chunks))
        for chunk in program.chunks:
            sizes[chunk.place] = sizes.get(chunk.place, 0) + share
        return sizes

    def _open_program(self, message: wire.OpenProgram) -> None:
        if len(message.steps) > wire.MAX_COPIES:
            raise Refusal.bad("steps", len(message.steps), f"at most {wire.MAX_COPIES} copies")
        program = self.copies.open_program(message)
        self.send(wire.Done(message.id, program.size))

    def _close_program(self, message: wire.CloseProgram) -> None:
        self.copies.close_program(message.program)
        self.send(wire.Done(message.id))

    def _open_window(self, message: wire.OpenWindow, fds: list[int] | None = None) -> None:
        if not fds or len(fds) != 1:
            raise Refusal.bad("descriptors", len(fds or ()), "one, of the window's memory")
        self.copies.check_window(message, self._driver.granularity(self.lease.gpu))
        size = message.slots * message.slot_bytes
        try:
            handle = self._driver.adopt(fds[0], size)
            if handle.place != self.lease.gpu:
                self._driver.release([handle])
                raise Refusal.bad("window memory", f"on {handle.place}", f"memory of your own GPU {self.lease.gpu}")
            address = self._driver.reserve(size)
            self._driver.map([(address, handle)])
        except DriverError as error:
            raise Refusal.bad(
                "window memory", f"descriptor of {size} bytes", f"memory of this driver ({error})"
            ) from None
        self.copies.add_window(
            Window(message.window, message.first, message.slots, message.slot_bytes, handle, address)
        )
        self.send(wire.Done(message.id))

    def _close_window(self, message: wire.CloseWindow) -> None:
        self._unmap_window(self.copies.remove_window(message.window))
        self.send(wire.Done(message.id))

    def _unmap_window(self, window: Window) -> None:
        self._driver.unmap([window.address])
        self._driver.unreserve([window.address])
        self._driver.release([window.handle])

    # --- regions -----------------------------------------------------------------------------------------------------

    def _grow(self, message: wire.GrowRegion) -> None:
        lease = self.lease
        region = lease.regions.get(message.region)
        count = self._chunks(message.size)
        if region is None:
            if not 0 <= message.region < wire.MAX_REGIONS:
                raise Refusal.bad("region", message.region, f"a number below {wire.MAX_REGIONS}")
            region = Region(message.region, message.droppable)
        elif region.droppable is not message.droppable:
            raise Refusal.bad("droppable", message.droppable, f"{region.droppable}, as the region was made")
        if any(w.region is region for w in self.waiters):
            raise Refusal(Kinds.BUSY, f"region {region.number} is growing: wait for that answer first")
        before = len(region.chunks)
        if count < before:
            raise Refusal.bad("size", message.size, f"at least the {before * lease.chunk} bytes there are (or shrink)")
        self._may_want((count - before) * lease.chunk)
        lease.regions[region.number] = region
        region.chunks += [None] * (count - before)
        self._wait_for(message.id, region, before, message.timeout)

    def _renew(self, message: wire.RenewRegion) -> None:
        region = self._region(message.region)
        gone = [c for c in region.chunks if c is not None and c.state is State.DROPPED]
        self._may_want(len(gone) * self.lease.chunk)
        if self.copies.busy():
            raise Refusal(Kinds.BUSY, "a run is under way: wait for its end first")
        self._later_free(
            gone, message.id, lambda: self._wait_for(message.id, region, len(region.chunks), message.timeout)
        )

    def _shrink(self, message: wire.ShrinkRegion) -> None:
        region = self._region(message.region)
        count = self._chunks(message.size)
        if count > len(region.chunks):
            raise Refusal.bad(
                "size", message.size, f"at most the {len(region.chunks) * self.lease.chunk} bytes there are"
            )
        if any(w.region is region for w in self.waiters):
            raise Refusal(Kinds.BUSY, f"region {region.number} is growing: wait for that answer first")
        gone = [c for c in region.chunks[count:] if c is not None]
        if users := self.copies.users_of(gone):
            raise Refusal(Kinds.IN_USE, f"programs {users} copy what would go: close them first")
        self._later(message.id, self._cut(region, count))

    async def _cut(self, region: Region, count: int) -> int:
        deadline = time.monotonic() + DRAIN
        while self.copies.busy():
            if time.monotonic() > deadline:
                raise Refusal(Kinds.IN_USE, "a run under way does not end: hand its slots over first")
            await asyncio.sleep(PAUSE)
        for index in [i for i in region.promised if i >= count]:
            self._steward.ledger.withdraw(self.lease, region, index)
        gone = [c for c in region.chunks[count:] if c is not None]
        del region.chunks[count:]
        await self._free(gone)
        if not region.chunks:
            self.lease.regions.pop(region.number, None)
        self._steward.wake()
        return 0

    def _ask_dropped(self, message: wire.AskDropped) -> None:
        region = self._region(message.region)
        gone = [i for i, c in enumerate(region.chunks) if c is not None and c.state is State.DROPPED]
        page = 4096
        for first in range(0, max(1, len(gone)), page):
            more = first + page < len(gone)
            self.send(wire.Dropped(message.id, region.number, gone[first : first + page], more))

    def _region(self, number: int) -> Region:
        region = self.lease.regions.get(number)
        if region is None:
            raise Refusal.bad("region", number, "a region that is open")
        return region

    def _chunks(self, size: int) -> int:
        if size < 0:
            raise Refusal.bad("size", size, "0 or more bytes")
        return -(-size // self.lease.chunk)

    def _may_want(self, more: int) -> None:
        lease = self.lease
        wanted = lease.wanted(droppable=False) + lease.wanted(droppable=True)
        if wanted + more > lease.limit:
            raise Refusal(
                Kinds.LIMIT,
                f"{wanted} bytes held or asked for and {more} more are above this lease's limit of {lease.limit}",
                field="size",
                value=more,
                expected=f"at most {lease.limit - wanted} more bytes",
            )

    # --- waiting for grants ------------------------------------------------------------------------------------------

    def _wait_for(self, request: int, region: Region, before: int, timeout: float) -> None:
        now = time.monotonic()
        if not timeout >= 0.0:
            raise Refusal.bad("timeout", timeout, "0 or more seconds")
        if not self.waiters:
            self.lease.asked_at = now
        self.waiters.append(Waiter(request, region, before, now + min(timeout, 86400.0)))
        self.granted(region)
        self._steward.wake()

    def granted(self, region: Region) -> None:
        """Memory of this region arrived."""
        for waiter in [w for w in self.waiters if w.region is region]:
            if not region.promised and not region.missing:
                self.waiters.remove(waiter)
                self.send(wire.Done(waiter.request, len(region.chunks) * self.lease.chunk))

    def look(self, now: float) -> None:
        """After a plan, and from time to time: positions that changed, and requests whose time has run out."""
        entry = self._steward.waiting.get(self.lease.id)
        for waiter in list(self.waiters):
            if now >= waiter.deadline and not waiter.region.promised:
                self.waiters.remove(waiter)
                self._give_up(waiter, entry.position if entry else 0)
            elif entry is not None and entry.position != waiter.position:
                waiter.position = entry.position
                self.tell(wire.Queued(waiter.request, entry.position, max(0.0, waiter.deadline - now)))
        self._look_at_share(now)

    def _give_up(self, waiter: Waiter, position: int) -> None:
        region = waiter.region
        short = len(region.missing) * self.lease.chunk
        text = f"{short} bytes were not to be had in time; place {position} in the queue"
        full = Refusal(Kinds.FULL, text, position=position)

        async def undo() -> int:
            await self._cut(region, waiter.before)
            raise full

        self._later(waiter.request, undo())

    # --- the client's own share --------------------------------------------------------------------------------------

    @property
    def _promised(self) -> int:
        return max(0, self.share_granted - self.share_mapped)

    def _grow_share(self, message: wire.GrowShare) -> None:
        info = self._steward.node.memory.get(self.lease.gpu)
        most = info.total - info.reserved if info else 0
        if not 0 <= message.size <= most:
            raise Refusal.bad("size", message.size, f"0 to the GPU's {most} bytes")
        self._promise(message.size)
        deadline = time.monotonic() + max(0.0, min(message.timeout, 86400.0))
        self._share_waiters.append((message.id, message.size, deadline))
        self._steward.wake()
        self._look_at_share(time.monotonic())

    def _share_is(self, message: wire.ShareIs) -> None:
        if message.size < 0:
            raise Refusal.bad("size", message.size, "0 or more bytes")
        before = self._promised
        self.share_mapped = message.size
        self.share_granted = max(self.share_granted if self._share_waiters else 0, message.size)
        self._steward.node.promised[self.lease.gpu] += self._promised - before
        self._steward.wake()

    def _promise(self, size: int) -> None:
        before = self._promised
        self.share_granted = max(self.share_mapped, size)
        self._steward.node.promised[self.lease.gpu] += self._promised - before

    def _look_at_share(self, now: float) -> None:
        node = self._steward.node
        for waiter in list(self._share_waiters):
            request, size, deadline = waiter
            if node.free(self.lease.gpu) >= self._promised:
                self._share_waiters.remove(waiter)
                self.send(wire.Done(request, size))
            elif now >= deadline:
                self._share_waiters.remove(waiter)
                free = node.free(self.lease.gpu)
                need = self._promised
                self._promise(self.share_mapped)
                text = (
                    f"{need} bytes are not free on {self.lease.gpu} ({free} are), and nothing lent is left to take back"
                )
                self._refuse(request, Refusal(Kinds.MEMORY, text))

    @property
    def waits_for_share(self) -> bool:
        """Whether the owner of this GPU waits for its own memory."""
        return bool(self._share_waiters)

    # --- giving back -------------------------------------------------------------------------------------------------

    def _later_free(self, chunks: list[Chunk], request: int, then: Callable[[], None]) -> None:
        async def work() -> None:
            await self._free(chunks)
            try:
                then()
            except Refusal as refusal:
                self._refuse(request, refusal)

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _free(self, chunks: list[Chunk]) -> None:
        """Give chunks back that no queued copy names any more."""
        steward = self._steward
        while any(c.busy or c.state is State.MOVING for c in chunks):
            await asyncio.sleep(PAUSE)
        if not chunks:
            return
        places = {c.handle.place for c in chunks}
        with steward.node.changing(places):
            for c in chunks:
                steward.ledger.free(c)
            await steward.in_thread(self._free_blocking, chunks)
            for c in chunks:
                if c.state not in (State.DROPPED, State.LOST):
                    steward.node.ours[c.place] -= c.size

    def _free_blocking(self, chunks: list[Chunk]) -> None:
        self._steward.backing.take([c for c in chunks if c.state is not State.LOST])
        self._steward.backing.give_back(chunks, self.lease.id)

    def _report(self, message: wire.Report) -> None:
        if not (0.0 <= message.waited < 1e9 and 0.0 <= message.stepped < 1e9 and message.steps >= 0):
            raise Refusal.bad("report", message, "seconds and steps that are 0 or more")
        self.waited += message.waited
        self.stepped += message.stepped
        self.steps += message.steps

    def _goodbye(self, _message: wire.Goodbye) -> None:
        if self.connection is not None:
            self.connection.close("the client said goodbye")

    def disconnected(self, _why: str) -> None:
        """The connection is gone: give everything back, whatever was queued."""
        if self.closing:
            return
        self.closing = True
        self._lanes.forget(self.lease.id)
        task = asyncio.get_running_loop().create_task(self._end())
        self._tasks.add(task)

    async def _end(self) -> None:
        steward, copies, lease = self._steward, self.copies, self.lease
        self.waiters.clear()
        self._share_waiters.clear()
        self._promise(self.share_mapped)
        for task in [t for t in self._tasks if t is not asyncio.current_task()]:
            task.cancel()
        while any(r.promised for r in lease.regions.values()) or any(
            c.busy or c.state is State.MOVING for c in lease.chunks()
        ):
            await asyncio.sleep(PAUSE)
        await steward.in_thread(self._drain)
        for program in copies.programs.values():
            for graph in program.graphs:
                graph.close()
        for stream in copies.streams.values():
            stream.close()
        await self._free(list(lease.chunks()))
        lease.regions.clear()
        steward.backing.forget_scratch(lease.id)
        for window in list(copies.windows.values()):
            self._unmap_window(window)
        self.shared.close()
        self.notice.close()
        self._private.close()
        steward.ledger.close_lease(lease.id)
        steward.wake()
        self._ended(self)

    def _drain(self) -> None:
        """Let everything pass that the client queued: its slots are handed over in its place, until nothing is left."""
        copies = self.copies
        backing = self._steward.backing
        backing.gates.open([c.gate for c in self.lease.chunks()])
        flags = [
            s * wire.SLOT_WORDS + wire.SLOT_FLAG
            for w in copies.windows.values()
            for s in range(w.first, w.first + w.slots)
        ]
        deadline = time.monotonic() + DRAIN
        value = wire.EMPTY
        while not all(s.done() for s in copies.streams.values()) and time.monotonic() < deadline:
            copies.shared.fill(flags, value)
            value = wire.FULL - value
            time.sleep(PAUSE)


def welcome(session: Session, driver: MemoryDriver, node: Node) -> tuple[wire.Welcome, list[int], Callable[[], None]]:
    """The answer to Hello, the descriptors beside it, and what to call when they were sent."""
    lease = session.lease
    fds = [session.shared.fileno(), session.notice.fileno()]
    try:
        guest = driver.guest(lease.gpu)
    except InvalidUse:
        close: Callable[[], None] = lambda: None  # noqa: E731
    else:
        fds.append(guest)
        close = partial(os.close, guest)
    message = wire.Welcome(
        version=wire.VERSION,
        driver=driver.name,
        lease=lease.id,
        gpu=lease.gpu,
        pool=lease.pool,
        chunk=lease.chunk,
        granularity=driver.granularity(lease.gpu),
        limit=lease.limit,
        guaranteed=lease.guaranteed,
        rate=node.best_rate(lease.gpu),
        guest=len(fds) == 3,
    )
    return message, fds, close
