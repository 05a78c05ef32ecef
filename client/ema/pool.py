"""The pool as a client sees it: one connection to the node's agent, and everything made from it.

The agent may be restarted at any time. Then regions and programs of the old agent raise `AgentLost` at their next use,
windows and shares (the client's own memory) are handed to the new agent, and new regions can be made.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self

from ema import arguments, errors
from ema.channel import Channel, failure
from ema.program import Program
from ema.region import Region
from ema.runs import SLICE, Runs
from ema.share import Share
from ema.staging import Staging
from ema.tickets import Ticket
from ema.window import Window
from ema_core import places, wire
from ema_core.ids import GpuId, Place
from ema_core.wire import CopyStep
from ema_driver import open_guest
from ema_driver.errors import DriverError, OutOfMemory
from ema_driver.protocol import CpuVisible, MemoryDriver, Words

REPORT: Final = 1.0
"""Seconds between two reports of what was measured."""
BACKOFF: Final = (0.05, 2.0)
"""Seconds until the first and between later attempts to reach an agent that is gone."""


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LONGEST_PATH: Final = 107


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    gpu: str | int | None = None,
    name: str = "",
    pool: str = "",
    timeout: float = 5.0,
) -> "Pool":
    """Connect to the node's agent.

    `socket` is the agent's path; without it `EMA_SOCKET`, else the local `ema up` of this user, else of the machine.
    `gpu` is this process's own GPU, by UUID or index; without it `EMA_GPU`, else the only one there is. Waits up to
    `timeout` seconds for the agent. Raises AgentLost (nobody answers), BadInput (no such GPU or pool; a bad name).
    """
    if gpu is not None and (isinstance(gpu, bool) or not isinstance(gpu, str | int)):
        raise errors.BadInput("gpu", repr(gpu), "a UUID or an index")
    if name and not _NAME.fullmatch(name):
        raise errors.BadInput("name", repr(name), "1 to 63 letters, digits, '.', '_' or '-'")
    if not isinstance(pool, str):
        raise errors.BadInput("pool", repr(pool), "the name of a MemoryPool, or nothing")
    timeout = arguments.seconds("timeout", timeout)
    own = os.environ.get("EMA_GPU", "") if gpu is None else str(gpu)
    paths = [os.fspath(socket)] if socket else places.client_sockets(os.environ, os.getuid())
    if socket and len(os.fsencode(paths[0])) > _LONGEST_PATH:
        raise errors.BadInput("socket", paths[0], f"a path of at most {_LONGEST_PATH} bytes")
    hello = wire.Hello(wire.VERSION, gpu=own, name=name or f"pid-{os.getpid()}", pool=pool)
    end = time.monotonic() + timeout
    while True:
        path = next((p for p in paths if os.path.exists(p)), paths[0])  # noqa: PTH110 - pathlib costs import time
        try:
            return Pool(path, hello)
        except errors.AgentLost:
            if time.monotonic() >= end:
                raise
            time.sleep(BACKOFF[0])


class Pool:
    """A connection to the agent, and the way to everything. Thread-safe. Use as a context manager, or `close` it."""

    driver: MemoryDriver
    shared: Words
    """The page of slot flags."""
    runs: Runs
    """Runs under way with the agent that is connected now."""
    _notice: Words

    def __init__(self, path: str, hello: wire.Hello) -> None:
        self._path, self._hello = path, hello
        self._lock = threading.RLock()
        self.staging = Staging(self)
        self._regions: dict[int, Region] = {}
        self._programs: dict[int, Program] = {}
        self._windows: dict[int, Window] = {}
        self._share: Share | None = None
        self._lost: dict[int, tuple[list[int], str]] = {}
        """Region → chunks that went with their GPU, and why."""
        self._pages: dict[int, list[int]] = {}
        """Pages of an answer that has not ended."""
        self._fetched: dict[int, tuple[Region, int, int, int]] = {}
        """Slot → what of a droppable region is being fetched into it, and how often that was renewed before."""
        self.orphans: set[int] = set()
        """Slots that an agent which is gone was to fill."""
        self.session = 0
        """Counts the agents that this pool has been connected to."""
        self._closed = self._reconnecting = False
        self._broken: errors.EmaError | None = None
        self._retired: list[Words] = []
        """Pages of the agent before this one: threads may still look at them for a moment."""
        self._measures = threading.Condition()
        """Guards what is measured and counted below."""
        self._waiters = 0
        self._waited = self._stepped = 0.0
        self._steps = 0
        self._reported = time.monotonic()
        self.exposed_wait = 0.0
        """Seconds that this process has waited for slots, in all."""
        self.queue_position: int | None = None
        """Place in the queue of a request that waits for memory (0 is next); None when nothing waits."""
        self.queue_deadline: float | None = None
        """When that request is answered in any case, on the clock of `time.monotonic`; None when nothing waits."""
        self._adopt(Channel(path, hello, self._event, self._lost_agent))

    # --- what it is ---

    @property
    def gpu(self) -> GpuId:
        """This process's own GPU."""
        return GpuId(Place(self._welcome.gpu))

    @property
    def chunk(self) -> int:
        """Bytes of a chunk: regions and shares are whole numbers of it."""
        return self._welcome.chunk

    @property
    def granularity(self) -> int:
        """Windows are multiples of this many bytes."""
        return self._welcome.granularity

    @property
    def lease(self) -> str:
        """Name of this process's lease on the node."""
        return self._welcome.lease

    @property
    def limit(self) -> int:
        """Bytes that this lease may ever hold."""
        return self._welcome.limit

    @property
    def guaranteed(self) -> int:
        """Bytes that this lease gets before others."""
        return self._welcome.guaranteed

    @property
    def rate(self) -> int:
        """Bytes per second of the fastest path from a neighbour to this GPU."""
        return self._welcome.rate

    @property
    def alive(self) -> bool:
        """Whether an agent is connected just now."""
        return self._channel.lost is None and not self._closed

    # --- making things ---

    def window(self, slots: int, slot_bytes: int) -> Window:
        """`slots` slots of `slot_bytes` bytes of this process's own GPU memory, for the agent to fill and empty.

        Raises BadInput if their sum is no multiple of `granularity`, OutOfMemory, AgentLost.
        """
        slots = arguments.whole("slots", slots, 1, wire.MAX_SLOTS)
        slot_bytes = arguments.whole("slot_bytes", slot_bytes, 1)
        if (slots * slot_bytes) % self.granularity:
            raise errors.BadInput("slot_bytes", f"{slots} × {slot_bytes}", f"a multiple of {self.granularity} bytes")
        self.check_alive()
        with self._lock:
            number = _first_free(self._windows, wire.MAX_WINDOWS, "windows")
            first = _first_gap([range(w.first, w.first + len(w)) for w in self._windows.values()], slots)
            try:
                window = Window(self, number, first, slots, slot_bytes)
            except OutOfMemory as error:
                raise errors.OutOfMemory(str(error)) from error
            except DriverError as error:
                raise errors.EmaError(f"the driver refused the window: {error}") from error
            try:
                self._hand_over(window)
            except errors.EmaError:
                window.free()
                raise
            self._windows[number] = window
            for slot in window.slots:
                # An earlier window's slot with this number may have been closed while it was full.
                slot.reset()
                self.orphans.discard(slot.number)
                self._fetched.pop(slot.number, None)
                self.runs.into.pop(slot.number, None)
        return window

    def region(self, size: int, *, droppable: bool = False, timeout: float = 2.0) -> Region:
        """Borrow `size` bytes. `droppable` ones may be taken without notice; `Reclaimed` comes before they are used.

        Raises PoolFull (with the place in the queue) if they are not to be had within `timeout` seconds, LimitReached,
        AgentLost, BadInput.
        """
        size, timeout = arguments.whole("size", size, 1), arguments.seconds("timeout", timeout)
        self.check_alive()
        with self._lock:
            region = Region(self, _first_free(self._regions, wire.MAX_REGIONS, "regions"), droppable=bool(droppable))
            self._regions[region.number] = region
            self._lost.pop(region.number, None)  # of an earlier region with this number
        try:
            region.grow(size, timeout)
        except BaseException:
            self.forget_region(region)
            raise
        return region

    def program(self, steps: Sequence[CopyStep], *, store: bool = False) -> Program:
        """Register copies (`Region.step`) that are the same at every step of a model. Raises BadInput, AgentLost."""
        steps = list(steps)
        if not 1 <= len(steps) <= wire.MAX_COPIES:
            raise errors.BadInput("steps", len(steps), f"1 to {wire.MAX_COPIES} of Region.step")
        for at, step in enumerate(steps):
            if not isinstance(step, CopyStep):
                raise errors.BadInput(f"steps[{at}]", repr(step)[:80], "what Region.step gives")
            if (region := self._regions.get(step.region)) is not None and region.droppable:
                raise errors.BadInput(f"steps[{at}]", f"of region {step.region}", "of a region that is not droppable")
        with self._lock:
            number = _first_free(self._programs, wire.MAX_PROGRAMS, "programs")
            answer = self.ask(lambda i: wire.OpenProgram(i, number, store, steps))
            program = Program(self, number, steps, answer.value if isinstance(answer, wire.Done) else 0)
            self._programs[number] = program
        return program

    def share(self, size: int) -> Share:
        """This GPU's own share of `size` bytes at most, which lends what it does not use. One per pool.

        Making it opts in: until then the GPU that a client runs on lends nothing.
        """
        size = arguments.whole("size", size, self.chunk)
        self.check_alive()
        with self._lock:
            if self._share is not None:
                raise errors.InUse("this pool has a share already; grow that one or close it first")
            self._share = Share(self, size - size % self.chunk)
            self.share_is()
            return self._share

    def close(self) -> None:
        """Give everything back and disconnect. Twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.runs.finished = errors.EmaError("this pool is closed")
        self._channel.close()
        with self._measures:
            # Who waits looks up at least every SLICE seconds, and must not find its page gone.
            self._measures.wait_for(lambda: self._waiters == 0, 10 * SLICE)
        if self._share is not None:
            self._share.shrink(0)
        for window in list(self._windows.values()):
            window.free()
        self._windows.clear()
        for page in (self.shared, self._notice, *self._retired):
            page.close()
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- copies ---

    def run(self, steps: list[CopyStep], *, store: bool) -> Ticket:
        """Send copies that are no program. Raises AgentLost, DataLost, Reclaimed (of bytes that are known dropped)."""
        for step in steps:
            region = self._regions.get(step.region)
            if region is None or not region.droppable:
                continue
            region.check_dropped(step.at, step.size)
            if not store:
                # It may be dropped before the copy is made: looked at again when the slot is waited for.
                self._fetched[step.slot] = (region, step.at, step.size, region.renewals)
        if self.orphans:
            self.orphans.difference_update(s.slot for s in steps)
        return self.runs.run(steps, store=store)

    # --- checks before data is used ---

    def check_alive(self) -> None:
        """Raise AgentLost, or what the agent refused, if no agent is connected."""
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise errors.EmaError("this pool is closed")
        if self._channel.lost is not None:
            raise errors.AgentLost(self._channel.lost)

    def check_lost(self, regions: Iterable[int]) -> None:
        """Raise DataLost if chunks of these regions went with their GPU."""
        if self._lost:
            for number in regions:
                if (lost := self._lost.get(number)) is not None:
                    raise errors.DataLost(number, *lost)

    def check_slot(self, slot: int) -> None:
        """Raise what keeps a slot from being handed over: AgentLost, DataLost, or a refusal."""
        if slot in self.orphans:
            self.orphans.discard(slot)
            raise errors.AgentLost(f"slot {slot} was to be filled by an agent that is gone; fetch again")
        self.runs.check_slot(slot, list(self._programs.values()))

    def check_fetched(self, slot: int) -> None:
        """Raise Reclaimed if what was fetched into the slot had been dropped."""
        fetched = self._fetched.pop(slot, None) if self._fetched else None
        if fetched is not None:
            region, at, size, renewals = fetched
            try:
                region.check_dropped(at, size, renewals)
            except errors.Reclaimed:
                self.shared.store(slot * wire.SLOT_WORDS + wire.SLOT_FLAG, wire.EMPTY)
                raise

    def drops(self, region: Region) -> int:
        """How often chunks of regions with this number were dropped."""
        return self._notice.load(wire.NOTICE_REGIONS + region.number)

    def dropped_chunks(self, region: Region) -> list[int]:
        """Ask which chunks of a region are gone."""
        with self._lock:
            self._pages[region.number] = []
            answer = self.ask(lambda i: wire.AskDropped(i, region.number))
            rest = answer.chunks if isinstance(answer, wire.Dropped) else []
            return self._pages.pop(region.number) + rest

    # --- for the objects made from it ---

    def ask(self, make: Callable[[int], wire.ClientMessage], fds: Sequence[int] = ()) -> wire.AgentMessage:
        """Send a request and wait for its answer."""
        self.check_alive()
        return self._channel.ask(make, fds)

    def ask_for_memory(self, make: Callable[[int], wire.ClientMessage]) -> wire.AgentMessage:
        """Send a request that may have to wait in the queue, and wait for its answer."""
        try:
            return self.ask(make)
        finally:
            self.queue_position = self.queue_deadline = None

    def ask_share(self, _share: Share, size: int, timeout: float) -> None:
        """Ask that `size` bytes of the own GPU be free for the share."""
        self.ask(lambda i: wire.GrowShare(i, size, timeout))

    def share_is(self) -> None:
        """Tell how much the share has mapped."""
        if self._share is not None and self.alive:
            self._channel.send(wire.ShareIs(self._share.local))

    def view(self, address: int, size: int) -> memoryview | None:
        """The mapped bytes, where the CPU can map them too."""
        return self.driver.view(address, size) if isinstance(self.driver, CpuVisible) else None

    def begin_wait(self) -> None:
        """A thread is about to wait for a word of the pages. Raises EmaError if the pool is closed."""
        with self._measures:
            if self._closed:
                raise errors.EmaError("this pool is closed")
            self._waiters += 1

    def end_wait(self) -> None:
        """It waits no more."""
        with self._measures:
            self._waiters -= 1
            self._measures.notify_all()

    def waited(self, seconds: float) -> None:
        """Count exposed waiting."""
        with self._measures:
            self.exposed_wait += seconds
            self._waited += seconds

    def stepped(self, seconds: float, now: float) -> None:
        """Count a step, and report now and then."""
        with self._measures:
            self._stepped += seconds
            self._steps += 1
            if now - self._reported <= REPORT or not self.alive:
                return
            self._reported = now
            report = wire.Report(self._waited, self._stepped, self._steps)
            self._waited = self._stepped = 0.0
            self._steps = 0
        self._channel.send(report)

    def forget_region(self, region: Region) -> None:
        """The region is closed."""
        with self._lock:
            if self._regions.get(region.number) is region:
                del self._regions[region.number]
                self._lost.pop(region.number, None)

    def forget_program(self, program: Program) -> None:
        """The program is closed."""
        with self._lock:
            if self._programs.get(program.number) is program:
                del self._programs[program.number]

    def forget_window(self, window: Window) -> None:
        """The window is to be closed: the agent lets go of it first."""
        if self.alive:
            self.runs.settle([s.number for s in window.slots])
            self.ask(lambda i: wire.CloseWindow(i, window.number))
        with self._lock:
            self._windows.pop(window.number, None)

    def forget_share(self, share: Share) -> None:
        """The share is closed."""
        with self._lock:
            if self._share is share:
                self._share = None

    # --- the agent comes and goes ---

    def _adopt(self, channel: Channel) -> None:
        """Make an agent's connection this pool's own, and hand it what is the client's."""
        welcome = channel.welcome
        shared, notice, *guest = channel.fds
        try:
            self._open_driver(welcome, guest)
            new_shared = self.driver.adopt_words(shared, wire.MAX_SLOTS * wire.SLOT_WORDS)
            new_notice = self.driver.adopt_words(notice, wire.NOTICE_WORDS)
        finally:
            for fd in channel.fds:
                os.close(fd)
            channel.fds = []
        with self._lock:
            self._welcome = welcome
            if self.session:
                gone = "it went with the agent that ran it; an agent is there again"
                self.runs.finished = errors.AgentLost(gone)
                self.orphans.update(self.runs.into, *(p.slots for p in self._programs.values()))
                retired, self._retired = self._retired, [self.shared, self._notice]
                for page in retired:
                    page.close()
            self.shared, self._notice = new_shared, new_notice
            self.runs = Runs(self, channel, new_shared, new_notice)
            self._regions.clear()
            self._programs.clear()
            for kept in (self._lost, self._pages, self._fetched):
                kept.clear()
            self.session += 1
            self._channel = channel
            channel.listen()
            for window in self._windows.values():
                self._hand_over(window)
            self.share_is()

    def _open_driver(self, welcome: wire.Welcome, guest: Iterable[int]) -> None:
        if self.session:
            try:
                self.driver.memory()
            except DriverError:
                # The GPU itself was restarted: the client's own memory is gone with it.
                self._windows.clear()
                self.staging.forget()
                self._share = None
            else:
                return
        fd = next(iter(guest), None)
        self.driver = open_guest(welcome.driver, None if fd is None else os.dup(fd), GpuId(Place(welcome.gpu)))

    def _hand_over(self, window: Window) -> None:
        fd = self.driver.export(window.handle)
        number, first, slots, size = window.number, window.first, len(window), window.slot_bytes
        try:
            self._channel.ask(lambda i: wire.OpenWindow(i, number, first, slots, size), [fd])
        finally:
            os.close(fd)

    def _lost_agent(self, _why: str) -> None:
        with self._lock:
            if self._closed or self._reconnecting:
                return
            self._reconnecting = True
        threading.Thread(target=self._reconnect, name="ema-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        pause, most = BACKOFF
        while not self._closed:
            time.sleep(pause)
            pause = min(most, 2 * pause)
            try:
                channel = Channel(self._path, self._hello, self._event, self._lost_agent)
            except errors.EmaError:
                continue
            try:
                self._adopt(channel)
            except (errors.EmaError, DriverError):
                channel.close()
                continue
            with self._lock:
                # It may have gone again already, unheard while this flag was up.
                if channel.lost is None:
                    self._reconnecting = False
                    break
        if self._closed:
            self._channel.close()

    def _event(self, message: wire.AgentMessage) -> None:
        if isinstance(message, wire.Moved):
            if (region := self._regions.get(message.region)) is not None:
                region.rate = message.rate
        elif isinstance(message, wire.Lost):
            chunks, _ = self._lost.get(message.region, ([], ""))
            self._lost[message.region] = ([*chunks, *message.chunks], message.cause)
        elif isinstance(message, wire.Dropped):
            if message.id:
                self._pages.setdefault(message.region, []).extend(message.chunks)
        elif isinstance(message, wire.Queued):
            self.queue_position = message.position
            self.queue_deadline = time.monotonic() + message.deadline
        elif isinstance(message, wire.Refused):
            if message.word >= 0:
                self.runs.refuse(message.word, message.seq, failure(message))
            else:
                self._broken = errors.EmaError(f"the agent refused what this library sent: {message.message}")


def _first_free(taken: dict[int, Region] | dict[int, Program] | dict[int, Window], most: int, what: str) -> int:
    number = next((i for i in range(most) if i not in taken), None)
    if number is None:
        raise errors.InUse(f"{most} {what} are open, the most there can be: close one first")
    return number


def _first_gap(taken: list[range], slots: int) -> int:
    first = 0
    for used in sorted(taken, key=lambda r: r.start):
        if used.start - first >= slots:
            break
        first = used.stop
    if first + slots > wire.MAX_SLOTS:
        raise errors.InUse(f"no {slots} of {wire.MAX_SLOTS} slots are left: close a window first")
    return first
