"""The pool as a client sees it: one connection to the node's agent, and everything made from it.

The agent may be restarted at any time. Then regions and programs of the old agent raise `AgentLost` at their next use,
windows and shares (the client's own memory) are handed to the new agent, and new regions can be made.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self

from ema import errors
from ema.channel import Channel
from ema.program import Program
from ema.region import Region
from ema.share import Share
from ema.staging import Staging
from ema.tickets import Ticket
from ema.window import Window
from ema_core import places, wire
from ema_core.ids import GpuId, Place
from ema_core.wire import CopyStep
from ema_driver import open_guest
from ema_driver.errors import DriverError
from ema_driver.protocol import CpuVisible, MemoryDriver, Words

SLICE: Final = 0.1
REPORT: Final = 1.0
"""Seconds between two reports of what was measured."""
BACKOFF: Final = (0.05, 2.0)
"""Seconds until the first and between later attempts to reach an agent that is gone."""


def connect(
    socket: str | None = None, *, gpu: str | int | None = None, name: str = "", pool: str = "", timeout: float = 5.0
) -> "Pool":
    """Connect to the node's agent.

    `socket` is the agent's path; without it `EMA_SOCKET`, else the local `ema up` of this user, else of the machine.
    `gpu` is this process's own GPU, by UUID or index; without it `EMA_GPU`, else the only one there is. Waits up to
    `timeout` seconds for the agent. Raises AgentLost (nobody answers), BadInput (no such GPU or pool).
    """
    own = os.environ.get("EMA_GPU", "") if gpu is None else str(gpu)
    paths = [socket] if socket else places.client_sockets(os.environ, os.getuid())
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

    def __init__(self, path: str, hello: wire.Hello) -> None:
        self._path, self._hello = path, hello
        self._lock = threading.RLock()
        self._runs = threading.Lock()
        self.staging = Staging(self)
        self._regions: dict[int, Region] = {}
        self._programs: dict[int, Program] = {}
        self._windows: dict[int, Window] = {}
        self._share: Share | None = None
        self._lost: dict[int, tuple[list[int], str]] = {}
        """Region → chunks that went with their GPU, and why."""
        self._dropped: dict[int, tuple[int, list[int]]] = {}
        """Region → its notice word when we asked, and which chunks were gone then."""
        self._pages: dict[int, list[int]] = {}
        """Pages of an answer that has not ended."""
        self._fetched: dict[int, tuple[Region, int, int]] = {}
        """Slot → what of a droppable region is being fetched into it."""
        self._outstanding: list[tuple[int, int]] = []
        """Runs under way: word and number."""
        self._run_seq = 1
        self.session = 0
        """Counts the agents that this pool has been connected to."""
        self._closed = False
        self._broken: errors.EmaError | None = None
        self._waited = self._stepped = 0.0
        self._steps = 0
        self._reported = time.monotonic()
        self.exposed_wait = 0.0
        """Seconds that this process has waited for slots, in all."""
        self.queue_position: int | None = None
        """Place in the queue of a request that waits for memory; None when nothing waits."""
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
        if slots < 1 or slot_bytes < 1 or (slots * slot_bytes) % self.granularity:
            raise errors.BadInput("slot_bytes", f"{slots} × {slot_bytes}", f"a multiple of {self.granularity} bytes")
        with self._lock:
            number = _first_free(self._windows, wire.MAX_WINDOWS, "windows")
            first = max((w.first + len(w) for w in self._windows.values()), default=0)
            try:
                window = Window(self, number, first, slots, slot_bytes)
            except DriverError as error:
                raise errors.OutOfMemory(str(error)) from error
            try:
                self._hand_over(window)
            except errors.EmaError:
                window.free()
                raise
            self._windows[number] = window
        return window

    def region(self, size: int, *, droppable: bool = False, timeout: float = 2.0) -> Region:
        """Borrow `size` bytes. `droppable` ones may be taken without notice; `Reclaimed` comes before they are used.

        Raises PoolFull (with the place in the queue) if they are not to be had within `timeout` seconds, LimitReached,
        AgentLost, BadInput.
        """
        if size < 1:
            raise errors.BadInput("size", size, "1 or more bytes")
        with self._lock:
            region = Region(self, _first_free(self._regions, wire.MAX_REGIONS, "regions"), droppable=droppable)
            self._regions[region.number] = region
        try:
            region.grow(size, timeout)
        except BaseException:
            self.forget_region(region)
            raise
        return region

    def program(self, steps: Sequence[CopyStep], *, store: bool = False) -> Program:
        """Register copies (`Region.step`) that are the same at every step of a model. Raises BadInput, AgentLost."""
        with self._lock:
            number = _first_free(self._programs, wire.MAX_PROGRAMS, "programs")
            answer = self.ask(lambda i: wire.OpenProgram(i, number, store, list(steps)))
            program = Program(self, number, answer.value if isinstance(answer, wire.Done) else 0)
            self._programs[number] = program
        return program

    def share(self, size: int) -> Share:
        """This GPU's own share of `size` bytes at most, which lends what it does not use. One per pool.

        Making it opts in: until then the GPU that a client runs on lends nothing.
        """
        with self._lock:
            if self._share is not None:
                raise errors.InUse("this pool has a share already; grow that one or close it first")
            if size < self.chunk:
                raise errors.BadInput("size", size, f"at least one chunk of {self.chunk} bytes")
            self._share = Share(self, size - size % self.chunk)
            self.share_is()
            return self._share

    def close(self) -> None:
        """Give everything back and disconnect. Twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._channel.close()
        if self._share is not None:
            self._share.shrink(0)
        for window in list(self._windows.values()):
            window.free()
        self._windows.clear()
        self.shared.close()
        self._notice.close()
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
            self._check_dropped(region, step.at, step.size)
            if not store:
                # It may be dropped before the copy is made: looked at again when the slot is waited for.
                self._fetched[step.slot] = (region, step.at, step.size)
        with self._runs:
            self.check_alive()
            while len(self._under_way()) >= wire.OUTSTANDING:
                self.wait_run(*self._outstanding[0])
            seq = self._run_seq
            if any(word == wire.run_word(-1, seq) for word, _ in self._outstanding):
                seq += 1  # the run before last goes on and the last one has ended: the other word is free
            word = wire.run_word(-1, seq)
            self._outstanding.append((word, seq))
            self._run_seq = seq + 1
            self._channel.send(wire.Run(seq, store, steps))
        return Ticket(self, word, seq)

    def start(self, program: Program, session: int, seq: int) -> Ticket:
        """Start a program's run."""
        if session != self.session:
            raise errors.AgentLost(f"program {program.number} was lost with the agent that ran it; make it again")
        with self._runs:
            self.check_alive()
            word = wire.run_word(program.number, seq)
            self._admit(word, seq)
            self._channel.send(wire.Start(program.number, seq))
        return Ticket(self, word, seq)

    def run_ended(self, word: int, seq: int) -> bool:
        """Whether a run has been started and has ended."""
        load = self._notice.load
        started = load(wire.NOTICE_STARTED + word)
        number = seq & 0xFFFFFFFF
        return (started == number and load(wire.NOTICE_RUNS + word) == 0) or 0 < (
            started - number
        ) & 0xFFFFFFFF < 1 << 31

    def wait_run(self, word: int, seq: int, timeout: float | None = None) -> None:
        """Wait until a run has ended. Raises TimedOut, AgentLost, DataLost."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.run_ended(word, seq):
            self.check_alive()
            self.check_lost(None)
            left = SLICE if end is None else min(SLICE, end - time.monotonic())
            if left <= 0:
                raise errors.TimedOut(f"the copies did not end in {timeout} s")
            if self._notice.load(wire.NOTICE_STARTED + word) != seq & 0xFFFFFFFF:
                self._notice.wait(wire.NOTICE_STARTED + word, seq & 0xFFFFFFFF, left)
            else:
                self._notice.wait(wire.NOTICE_RUNS + word, 0, left)

    def _admit(self, word: int, seq: int) -> None:
        while True:
            under_way = self._under_way()
            same = [r for r in under_way if r[0] == word]
            if not same and len(under_way) < wire.OUTSTANDING:
                self._outstanding.append((word, seq))
                return
            self.wait_run(*(same or under_way)[0])

    def _under_way(self) -> list[tuple[int, int]]:
        self._outstanding = [r for r in self._outstanding if not self.run_ended(*r)]
        return self._outstanding

    # --- checks before data is used ---

    def check_alive(self) -> None:
        """Raise AgentLost, or what the agent refused, if no agent is connected."""
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise errors.EmaError("this pool is closed")
        if self._channel.lost is not None:
            raise errors.AgentLost(self._channel.lost)

    def check_lost(self, region: int | None) -> None:
        """Raise DataLost if chunks of the region (of any, for None) went with their GPU."""
        for number, (chunks, cause) in self._lost.items():
            if region is None or number == region:
                raise errors.DataLost(number, chunks, cause)

    def check_fetched(self, slot: int) -> None:
        """Raise Reclaimed if what was fetched into the slot had been dropped."""
        fetched = self._fetched.pop(slot, None)
        if fetched is not None:
            try:
                self._check_dropped(*fetched)
            except errors.Reclaimed:
                self.shared.store(slot * wire.SLOT_WORDS + wire.SLOT_FLAG, wire.EMPTY)
                raise

    def _check_dropped(self, region: Region, at: int, size: int) -> None:
        drops = self._notice.load(wire.NOTICE_REGIONS + region.number)
        known = self._dropped.get(region.number)
        if (known is None and drops == 0) or (known is not None and known == (drops, [])):
            return
        chunks = self.dropped_chunks(region) if known is None or known[0] != drops else known[1]
        if gone := region.covers(chunks, at, size):
            raise errors.Reclaimed(region.number, gone, self.chunk)

    def dropped_chunks(self, region: Region) -> list[int]:
        """Ask which chunks of a region are gone."""
        drops = self._notice.load(wire.NOTICE_REGIONS + region.number)
        with self._lock:
            self._pages[region.number] = []
            answer = self.ask(lambda i: wire.AskDropped(i, region.number))
            rest = answer.chunks if isinstance(answer, wire.Dropped) else []
            chunks = self._pages.pop(region.number) + rest
            self._dropped[region.number] = (drops, chunks)
        return chunks

    # --- for the objects made from it ---

    def ask(self, make: Callable[[int], wire.ClientMessage], fds: Sequence[int] = ()) -> wire.AgentMessage:
        """Send a request and wait for its answer."""
        self.check_alive()
        return self._channel.ask(make, fds)

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

    def waited(self, seconds: float) -> None:
        """Count exposed waiting."""
        self.exposed_wait += seconds
        self._waited += seconds

    def stepped(self, seconds: float) -> None:
        """Count a step, and report now and then."""
        self._stepped += seconds
        self._steps += 1
        now = time.monotonic()
        if now - self._reported > REPORT and self.alive:
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
                self._dropped.pop(region.number, None)
                self._lost.pop(region.number, None)

    def forget_dropped(self, region: Region) -> None:
        """The region's dropped chunks were renewed."""
        self._dropped[region.number] = (self._notice.load(wire.NOTICE_REGIONS + region.number), [])

    def forget_program(self, program: Program) -> None:
        """The program is closed."""
        with self._lock:
            if self._programs.get(program.number) is program:
                del self._programs[program.number]

    def forget_window(self, window: Window) -> None:
        """The window is to be closed: the agent lets go of it first."""
        if self.alive:
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
            self.shared, self._notice = new_shared, new_notice
            self._regions.clear()
            self._programs.clear()
            for kept in (self._lost, self._dropped, self._pages, self._fetched):
                kept.clear()
            self._outstanding = []
            self._run_seq = 1
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
        if not self._closed:
            threading.Thread(target=self._reconnect, name="ema-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        pause, most = BACKOFF
        while not self._closed:
            time.sleep(pause)
            pause = min(most, 2 * pause)
            try:
                channel = Channel(self._path, self._hello, self._event, self._lost_agent)
                self._adopt(channel)
            except (errors.EmaError, DriverError):
                continue
            return

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
        elif isinstance(message, wire.Refused):
            self._broken = errors.EmaError(f"the agent refused what this library sent: {message.message}")


def _first_free(taken: dict[int, Region] | dict[int, Program] | dict[int, Window], most: int, what: str) -> int:
    number = next((i for i in range(most) if i not in taken), None)
    if number is None:
        raise errors.InUse(f"{most} {what} are open, the most there can be: close one first")
    return number
