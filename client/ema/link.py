"""What everything of a client stands on: the line to an agent that comes and goes, and the pages shared with it.

The agent may be restarted at any time. Then regions and programs of the old agent raise `AgentLost` at their next use,
windows and shares (the client's own memory) are handed to the new agent, and new regions can be made.
"""

import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ema import errors
from ema.channel import Channel, failure
from ema.measures import Measures
from ema.runs import Runs
from ema.terms import Terms
from ema.unchecked import Unchecked
from ema_core import wire
from ema_core.ids import GpuId, Place
from ema_core.wire import CopyStep
from ema_driver import open_guest
from ema_driver.errors import DriverError
from ema_driver.protocol import CpuVisible, MemoryDriver, Words

if TYPE_CHECKING:
    from ema.program import Program
    from ema.region import Region
    from ema.share import Share
    from ema.tickets import Ticket
    from ema.window import Window

SETTLED: Final = 10.0
"""Seconds that an agent may take to answer a connection."""
BACKOFF: Final = (0.05, 2.0)
"""Seconds until the first and between later attempts to reach an agent that is gone."""


class Link(Terms):
    """A connection to the agent, whichever agent is there. Thread-safe."""

    driver: MemoryDriver
    shared: Words
    """The page of slot flags."""
    runs: Runs
    """Runs under way with the agent that is connected now."""
    _notice: Words

    def __init__(self, path: str, hello: wire.Hello) -> None:
        self._path, self._hello = path, hello
        self._lock = threading.RLock()
        self._regions: dict[int, Region] = {}
        self._programs: dict[int, Program] = {}
        self._windows: dict[int, Window] = {}
        self._share: Share | None = None
        self._lost: dict[int, tuple[list[int], str]] = {}
        """Region → chunks that went with their GPU, and why."""
        self._pages: dict[int, list[int]] = {}
        """Pages of an answer that has not ended."""
        self.unchecked = Unchecked()
        self.orphans: set[int] = set()
        """Slots that an agent which is gone was to fill."""
        self.session = 0
        """Counts the agents that this pool has been connected to."""
        self._closed = self._reconnecting = False
        self._ends = threading.Event()
        """Set when the pool is closed: nobody connects anew."""
        self._reconnector: threading.Thread | None = None
        self._broken: errors.EmaError | None = None
        self._retired: list[Words] = []
        """Pages of the agent before this one: threads may still look at them for a moment."""
        self.measures = Measures()
        self.queue_position: int | None = None
        """Place in the queue of a request that waits for memory (0 is next); None when nothing waits."""
        self.queue_deadline: float | None = None
        """When that request is answered in any case, on the clock of `time.monotonic`; None when nothing waits."""
        channel = Channel(path, hello, self._event, self._lost_agent)
        try:
            self._adopt(channel)
        except BaseException:
            self._closed = True
            channel.close()  # else its reader would keep the session
            raise

    # --- what it is ---

    @property
    def exposed_wait(self) -> float:
        """Seconds that this process has waited for slots, in all."""
        return self.measures.exposed_wait

    @property
    def notice(self) -> Words:
        """The page in which the agent tells of runs under way and of the session's end."""
        return self._notice

    @property
    def alive(self) -> bool:
        """Whether an agent is connected just now."""
        return self._channel.lost is None and not self._closed

    # --- copies ---

    def run(self, steps: list[CopyStep], *, store: bool) -> "Ticket":
        """Send copies that are no program. Raises AgentLost, DataLost, Reclaimed (of bytes that are known dropped)."""
        for step in steps:
            region = self._regions.get(step.region)
            if region is None or not region.droppable:
                continue
            region.check_dropped(step.at, step.size)
            if not store:
                self.unchecked.add(step.slot, region, step.at, step.size)
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

    def drops(self, region: "Region") -> int:
        """How often chunks of regions with this number were dropped."""
        return self._notice.load(wire.NOTICE_REGIONS + region.number)

    def dropped_chunks(self, region: "Region") -> list[int]:
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

    def ask_share(self, _share: "Share", size: int, timeout: float) -> None:
        """Ask that `size` bytes of the own GPU be free for the share."""
        self.ask(lambda i: wire.GrowShare(i, size, timeout))

    def share_is(self) -> None:
        """Tell how much the share has mapped."""
        if self._share is not None and self.alive:
            self._channel.send(wire.ShareIs(self._share.local))

    def view(self, address: int, size: int) -> memoryview | None:
        """The mapped bytes, where the CPU can map them too."""
        return self.driver.view(address, size) if isinstance(self.driver, CpuVisible) else None

    def stepped(self, seconds: float, steps: int, now: float) -> None:
        """Count steps, and report now and then."""
        self.measures.stepped(seconds, steps)
        if self.alive and (report := self.measures.due(now)) is not None:
            self._channel.send(report)

    def forget_region(self, region: "Region") -> None:
        """The region is closed."""
        with self._lock:
            if self._regions.get(region.number) is region:
                del self._regions[region.number]
                self._lost.pop(region.number, None)

    def forget_program(self, program: "Program") -> None:
        """The program is closed."""
        with self._lock:
            if self._programs.get(program.number) is program:
                del self._programs[program.number]

    def forget_window(self, window: "Window") -> None:
        """The window is to be closed: the agent lets go of it first."""
        if self.alive:
            self.runs.settle([s.number for s in window.slots])
            self.ask(lambda i: wire.CloseWindow(i, window.number))
        with self._lock:
            self._windows.pop(window.number, None)

    def forget_share(self, share: "Share") -> None:
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
            while channel.fds:
                os.close(channel.fds.pop())
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
            for kept in (self._lost, self._pages, self.unchecked):
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
                self._forget_own()
            else:
                return
        fd = next(iter(guest), None)
        self.driver = open_guest(welcome.driver, None if fd is None else os.dup(fd), GpuId(Place(welcome.gpu)))

    def _forget_own(self) -> None:
        """The client's own memory is gone with its GPU."""
        self._windows.clear()
        self._share = None

    def _hand_over(self, window: "Window") -> None:
        number, first, slots, size = window.number, window.first, len(window), window.slot_bytes
        memory = io.FileIO(self.driver.export(window.handle))  # closed in any case, be it by the collector
        try:
            self._channel.ask(lambda i: wire.OpenWindow(i, number, first, slots, size), [memory.fileno()])
        finally:
            memory.close()

    def _lost_agent(self, _why: str) -> None:
        with self._lock:
            if self._closed or self._reconnecting:
                return
            self._reconnecting = True
            self._reconnector = threading.Thread(target=self._reconnect, name="ema-reconnect", daemon=True)
            self._reconnector.start()

    def _reconnect(self) -> None:
        pause, most = BACKOFF
        while not self._ends.wait(pause):
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

    def _stay_apart(self) -> None:
        """The pool is closed: a connection that is being made just now is made first, and can then be closed too."""
        self._ends.set()
        if (thread := self._reconnector) is not None:
            thread.join(SETTLED)

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
