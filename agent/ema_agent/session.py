"""One client: its lease, its windows, regions and programs, from Hello to the last byte given back."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Final

from ema_agent.connection import Connection
from ema_agent.lanes import Lanes
from ema_agent.lease import Lease, State
from ema_agent.line import Line
from ema_agent.own_share import OwnShare
from ema_agent.programs import Copies, Load, Refusal, Window
from ema_agent.regions import Regions
from ema_agent.steward import Steward
from ema_core import wire
from ema_core.ids import Place
from ema_core.wire import Kinds
from ema_driver.errors import DriverError, NotMapped
from ema_driver.protocol import MemoryDriver, Stream

PENDING: Final = 64
"""Requests that one client may have unanswered."""
DRAIN: Final = 10.0
"""Seconds that a dead client's queued copies may take to pass."""
PAUSE: Final = 1e-3


class Session:
    """Handles one client's messages. Belongs to the agent's loop."""

    def __init__(
        self,
        driver: MemoryDriver,
        steward: Steward,
        lanes: Lanes,
        *,
        lease: Lease,
        connection: Connection,
        ended: Callable[["Session"], None],
    ) -> None:
        self.lease = lease
        self.closing = False
        self.waited = self.stepped = 0.0
        """Seconds that the client reported: waiting for fetches, and of steps in all."""
        self.steps = 0
        self._driver, self._steward, self._lanes, self._ended = driver, steward, lanes, ended
        self.line = Line(connection)
        with ExitStack() as undo:
            self.shared, self.notice, self._private = (
                undo.enter_context(closing(driver.words(count)))
                for count in (wire.MAX_SLOTS * wire.SLOT_WORDS, wire.NOTICE_WORDS, wire.RUN_WORDS)
            )
            fetch, store = (undo.enter_context(closing(driver.stream(lease.gpu))) for _ in range(2))
            undo.pop_all()
        pages = {"shared": self.shared, "notice": self.notice, "private": self._private}
        self.copies = Copies(lease, fetch, store, **pages, most=driver.most_copies)
        self.regions = Regions(lease, steward, self.copies, self.line)
        self.share = OwnShare(lease.gpu, steward.node, self.line)
        self._ending: asyncio.Task[None] | None = None
        self._do: dict[type, Callable[..., None]] = {
            wire.Start: self._start,
            wire.Run: self._run,
            wire.GrowRegion: self.regions.grow,
            wire.RenewRegion: self.regions.renew,
            wire.ShrinkRegion: self.regions.shrink,
            wire.AskDropped: self.regions.ask_dropped,
            wire.OpenProgram: self._open_program,
            wire.CloseProgram: self._close_program,
            wire.CloseWindow: self._close_window,
            wire.GrowShare: self._grow_share,
            wire.ShareIs: self._share_is,
            wire.Report: self._report,
            wire.Goodbye: self._goodbye,
        }

    def received(self, message: wire.ClientMessage, fds: list[int]) -> None:
        """One message of this client."""
        if self.closing:
            return
        request = getattr(message, "id", 0)
        if self._unanswered > PENDING and request:
            text = f"{PENDING} requests are unanswered: wait for answers first"
            self.line.refuse(request, Refusal(Kinds.BUSY, text))
            return
        try:
            if isinstance(message, wire.OpenWindow):
                self._open_window(message, fds)
            elif (do := self._do.get(type(message))) is None:
                self.line.refuse(request, Refusal.bad("message", type(message).__name__, "Hello only once, first"))
            else:
                do(message)
        except Refusal as refusal:
            self._refuse(message, refusal)
        except DriverError as error:
            self._refuse(message, Refusal(Kinds.INTERNAL, f"the driver refused: {error}"))

    def _refuse(self, message: wire.ClientMessage, why: Refusal) -> None:
        if isinstance(message, wire.Start) and 0 <= message.program < wire.MAX_PROGRAMS:
            why.run = wire.run_word(message.program, message.seq), message.seq
        elif isinstance(message, wire.Run):
            why.run = wire.run_word(-1, message.seq), message.seq
        self.line.refuse(getattr(message, "id", 0), why)

    @property
    def _unanswered(self) -> int:
        return self.line.unanswered + len(self.regions.waiters) + len(self.share.waiters)

    # --- copies ---

    def _start(self, message: wire.Start) -> None:
        program = self.copies.due(message)
        if program is None:
            self._steward.ledger.repeats += 1
            return
        sizes = program.sizes(self.lease) if self._lanes.caps else {}
        launch = partial(self.copies.launch, program, message.seq)
        self._lanes.submit(self.lease.id, sizes, partial(self._launch, message, launch))

    def _run(self, message: wire.Run) -> None:
        self._few(message.steps)
        if (run := self.copies.run(message)) is None:
            self._steward.ledger.repeats += 1
        else:
            load, queue = run
            self._lanes.submit(self.lease.id, _sizes(load), partial(self._launch, message, queue))

    def _launch(self, message: wire.Start | wire.Run, queue: Callable[[float], None]) -> None:
        """Queue a run, whose turn it is. Raises NotMapped with nothing done."""
        try:
            queue(time.monotonic())
        except NotMapped:
            raise
        except Refusal as refusal:  # what it names was lost while it waited
            why = refusal
        except DriverError as error:
            why = Refusal(Kinds.INTERNAL, f"the driver refused: {error}")
        else:
            return
        self.copies.withdraw(message)
        self._refuse(message, why)

    def _open_program(self, message: wire.OpenProgram) -> None:
        self._few(message.steps)
        program, make_ready = self.copies.open_program(message)

        async def ready() -> int:
            while not program.graphs:
                try:
                    await self._steward.work.apart(make_ready)
                except NotMapped:  # memory is swapped behind one of its addresses
                    await asyncio.sleep(PAUSE)
                    if not (self.closing or program.lost):
                        continue
                    self.copies.forget_program(program)
                    raise
                except DriverError:
                    self.copies.forget_program(program)
                    raise
            return program.size

        self.line.later(message.id, ready())

    def _close_program(self, message: wire.CloseProgram) -> None:
        self.copies.close_program(message.program)
        self.line.send(wire.Done(message.id))

    @staticmethod
    def _few(steps: list[wire.CopyStep]) -> None:
        if not 1 <= len(steps) <= wire.MAX_COPIES:
            raise Refusal.bad("steps", len(steps), f"1 to {wire.MAX_COPIES} copies")

    # --- windows ---

    def _open_window(self, message: wire.OpenWindow, fds: list[int]) -> None:
        if len(fds) != 1:
            raise Refusal.bad("descriptors", len(fds), "one, of the window's memory")
        self.copies.check_window(message, self._driver.granularity(self.lease.gpu))
        size = message.slots * message.slot_bytes
        try:
            handle = self._driver.adopt(fds[0], size)
        except DriverError as error:
            raise Refusal.bad("descriptor", f"refused ({error})", f"{size} bytes of this driver's memory") from None
        if handle.place != self.lease.gpu:
            self._driver.release([handle])
            raise Refusal.bad("descriptor", f"memory of {handle.place}", f"memory of your own GPU {self.lease.gpu}")
        try:
            address = self._driver.reserve(size)
            self._driver.map([(address, handle)])
        except DriverError as error:
            self._driver.release([handle])
            raise Refusal(Kinds.INTERNAL, f"the driver refused: {error}") from None
        window = Window(message.window, message.first, message.slots, message.slot_bytes, handle, address)
        self.copies.add_window(window)
        self.line.send(wire.Done(message.id))

    def _close_window(self, message: wire.CloseWindow) -> None:
        self._unmap(self.copies.remove_window(message.window))
        self.line.send(wire.Done(message.id))

    def _unmap(self, window: Window) -> None:
        self._driver.unmap([window.address])
        self._driver.unreserve([window.address])
        self._driver.release([window.handle])

    # --- the client's own GPU, and what it measured ---

    def _grow_share(self, message: wire.GrowShare) -> None:
        self.share.grow(message)
        self._steward.wake()
        if self.share.waiters:
            # The next reading answers it, and that is slow to come while nothing is lent.
            self._steward.moves.held_changed()

    def _share_is(self, message: wire.ShareIs) -> None:
        self.share.mapped_is(message)
        self._steward.wake()

    def _report(self, message: wire.Report) -> None:
        if not (0.0 <= message.waited < 1e9 and 0.0 <= message.stepped < 1e9 and 0 <= message.steps < 1 << 40):
            raise Refusal.bad("report", message, "seconds and steps that are 0 or more")
        self.waited += message.waited
        self.stepped += message.stepped
        self.steps += message.steps

    def look(self, now: float) -> None:
        """From time to time while a request waits, and when memory was read."""
        self.regions.look(now)
        self.share.look(now)

    # --- the end ---

    def broken(self) -> str:
        """Why this client's copies can go on no more; empty while they can."""
        for stream in self.copies.streams.values():
            try:
                stream.done()
            except DriverError as error:
                return str(error)
        return ""

    def _goodbye(self, _message: wire.Goodbye) -> None:
        self.line.connection.close("the client said goodbye")

    def disconnected(self, _why: str) -> None:
        """The connection is gone: give everything back, whatever was queued."""
        if not self.closing:
            self.closing = self.lease.closing = True
            self.notice.store(wire.NOTICE_OVER, 1)
            self._lanes.forget(self.lease.id)
            self._ending = asyncio.get_running_loop().create_task(self._end())
            self._ending.add_done_callback(self._steward.work.done)

    async def _end(self) -> None:
        steward, copies, lease = self._steward, self.copies, self.lease
        self.regions.waiters.clear()
        self.share.end()
        while self._in_motion():
            await asyncio.sleep(PAUSE)
        # From here on every gate is opened for good, so no plan may take a chunk of this lease any more.
        for c in lease.chunks():
            c.busy = True
        lost = [c for c in lease.chunks() if c.state is State.LOST]
        if lost:
            with suppress(DriverError):  # without scratch memory for them their copies are dropped with the stream
                await steward.work.in_thread(steward.backing.to_scratch, lost, lease.id)
        await self._let_pass()
        await self.line.hang_up()
        for program in copies.programs.values():
            for graph in program.graphs:
                graph.close()
        for stream in copies.streams.values():
            await steward.work.in_thread(stream.close)
        await self.regions.free(list(lease.chunks()), certain=True)
        lease.regions.clear()
        steward.backing.stock.forget_scratch(lease.id)
        for window in list(copies.windows.values()):
            self._unmap(window)
        for page in (self.shared, self.notice, self._private):
            page.close()
        steward.ledger.close_lease(lease.id)
        steward.wake()
        self._ended(self)

    def _in_motion(self) -> bool:
        lease = self.lease
        return any(r.promised for r in lease.regions.values()) or any(
            c.busy or c.state is State.MOVING for c in lease.chunks()
        )

    async def _let_pass(self) -> None:
        """Hand the slots over in the dead client's place until nothing that it queued is left.

        Not on a worker thread: a client that keeps its page and writes to it must not keep reclaims waiting.
        """
        copies = self.copies
        self._steward.backing.gates.open([c.gate for c in self.lease.chunks() if c.mapped])
        flags = [
            slot * wire.SLOT_WORDS + wire.SLOT_FLAG
            for w in copies.windows.values()
            for slot in range(w.first, w.first + w.slots)
        ]
        deadline = time.monotonic() + DRAIN
        value = wire.EMPTY
        while not all(map(_passed, copies.streams.values())) and time.monotonic() < deadline:
            self.shared.fill(flags, value)
            value = wire.FULL - value
            await asyncio.sleep(PAUSE)


def _passed(stream: Stream) -> bool:
    try:
        return stream.done()
    except DriverError:
        return True  # it failed: nothing of it runs any more


def _sizes(load: Load) -> Counter[Place]:
    """Bytes by lender, taken as spread evenly over the chunks."""
    sizes = Counter[Place]()
    part = sum(s.size for s in load.steps) // max(1, len(load.chunks))
    for chunk in load.chunks:
        sizes[chunk.place] += part
    return sizes
