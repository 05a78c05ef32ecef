"""Streams: queues of operations that run in order, by the loop, whatever becomes of the process that queued them."""

from collections import deque
from collections.abc import Callable
from typing import Any

from ema_core.ids import GpuId
from ema_driver import shared_memory
from ema_driver.errors import DeviceLost, DriverError
from ema_driver.sim.server.lanes import Job
from ema_driver.sim.server.loop import Loop
from ema_driver.sim.server.pages import Page, Pages

WAIT, WRITE, COPY = 0, 1, 2
Compiled = tuple[int, Any, int, int, Page | None]
"""(WAIT or WRITE, words, index, value, page) or (COPY, target, source, size, None)."""
Program = tuple[Compiled, ...]
_TURN = 64
"""Operations that a stream may run before others get their turn."""
_LONG_COPY = 64 << 10
"""Bytes; a longer copy ends the turn."""
QUEUE_LIMIT = 65_536
"""Programs."""


class Stream:
    """One stream of one session."""

    def __init__(
        self, loop: Loop, pages: Pages, device: GpuId, copy: Callable[["Stream", int, int, int], Job | None]
    ) -> None:
        self._loop, self._pages, self._copy = loop, pages, copy
        self.device = device
        self.error: DriverError | None = None
        self.clock = 0
        """When the last copy ended on its lane, if nothing was waited for since; else 0."""
        self._queue: deque[Program] = deque()
        self._program: Program = ()
        self._position = 0
        self._queued = 0
        self._finished = 0
        self._scheduled = False
        self._waits: tuple[Page, int] | None = None
        self.job: Job | None = None
        self._watchers: list[tuple[int, Callable[[], None]]] = []

    def append(self, program: Program) -> None:
        """Queue operations. Raises OverflowError above `QUEUE_LIMIT` programs."""
        if self.error is not None or not program:
            return
        if len(self._queue) >= QUEUE_LIMIT:
            raise OverflowError(f"more than {QUEUE_LIMIT} programs queued on one stream")
        self._queue.append(program)
        self._queued += 1
        if self._waits is None and self.job is None:
            self._schedule()

    @property
    def idle(self) -> bool:
        """All that was queued has run."""
        return self._finished == self._queued

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back once all that is queued now has run, or the stream failed."""
        if self.idle or self.error is not None:
            callback()
        else:
            self._watchers.append((self._queued, callback))

    def when_still(self, callback: Callable[[], None]) -> None:
        """After `fail`: call back once no byte moves any more."""
        if self.job is None:
            callback()
        else:
            self._watchers.append((self._queued, callback))

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo `when_idle`."""
        self._watchers = [watcher for watcher in self._watchers if watcher[1] is not callback]

    def fail(self, error: DriverError) -> None:
        """Drop what is queued; `error` sticks."""
        if self.error is not None:
            return
        self.error = error
        self._queue.clear()
        self._program, self._position = (), 0
        if self._waits is not None:
            page, index = self._waits
            self._waits = None
            self._pages.leave(page, index, self._resume)
        if self.job is not None:
            self.job.aborted = True
            self.job.leave()
            if not self.job.moving:
                self.job = None
        self._tell()

    def finished(self, job: Job, ended: int) -> None:
        """The copy in progress has ended."""
        job.leave()
        self.job = None
        self.clock = ended
        if self.error is None:
            self._schedule()
        else:
            self._tell()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.ready.append(self._run)

    def _resume(self) -> None:
        self._waits = None
        self.clock = 0
        self._schedule()

    def _run(self) -> None:
        self._scheduled = False
        for _ in range(_TURN):
            if self._position == len(self._program):
                if not self._next_program():
                    return
                continue
            kind, first, second, third, page = self._program[self._position]
            if page is None:
                self._position += 1
                self._begin_copy(first, second, third)
                if self.job is not None or self.error is not None:
                    return
                if third > _LONG_COPY:
                    break
            elif kind == WAIT:
                if first[second] != third:
                    self._waits = (page, second)
                    self._pages.park(page, second, third, self._resume)
                    return
                self._position += 1
            else:
                first[second] = third
                shared_memory.wake(page.base + 4 * second)
                if second in page.waiting:
                    page.check(second)
                self._position += 1
        self._schedule()

    def _next_program(self) -> bool:
        if self._program:
            self._program = ()
            self._position = 0
            self._finished += 1
            if self._watchers:
                self._tell()
        if not self._queue:
            return False
        self._program = self._queue.popleft()
        self._position = 0
        return True

    def _begin_copy(self, target: int, source: int, size: int) -> None:
        job = self._copy(self, target, source, size)
        if job is None:
            return
        self.job = job
        self._scheduled = True  # a copy that ends at once must not schedule a second run of this stream
        job.segments[0].lane.submit(job)
        self._scheduled = False

    def _tell(self) -> None:
        due = [watcher for watcher in self._watchers if watcher[0] <= self._finished or self.error is not None]
        self._watchers = [watcher for watcher in self._watchers if watcher not in due]
        for _, callback in due:
            callback()


def lost(device: GpuId) -> DeviceLost:
    """The error of streams that touch a lost GPU."""
    return DeviceLost(f"{device}: the GPU is lost")
