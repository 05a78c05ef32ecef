"""Links at work: each ordered pair of places is a lane with a rate, a latency and a queue.

Time on a lane is bookkept, not measured: a piece begins when the lane was free and the copy was ready, even if this
process noticed later. So late wake-ups do not add up, and a lane that always has work runs at its rate.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ema_driver.sim.server.loop import Loop, now
from ema_driver.sim.server.space import Mapped

_INLINE = 64 << 10
"""Pieces of paced lanes up to this many bytes are copied by the loop itself."""
_FAST = 8.0
"""Bytes per nanosecond from which on this machine sets the pace. Handing a piece to a worker and back then costs more
than it brings, so the loop copies up to `_FAST_COPY` bytes itself, `_FAST_PIECE` at a time."""
_FAST_PIECE, _FAST_COPY, _FAST_MAX = 512 << 10, 16 << 20, 64 << 20
_SLICE_NS = 2_000_000
"""A long copy is cut into pieces of about this much lane time, so that copies of several streams alternate."""
_PIECE_MIN, _PIECE_MAX = 64 << 10, 16 << 20
_CREDIT_NS = 20_000_000
"""How far back bookkeeping may reach: a stopped device process does not catch up for ever."""

_memmove = ctypes.memmove


@dataclass(slots=True, kw_only=True)
class Segment:
    """A part of a copy with one mapping on either side."""

    lane: "Lane"
    target: Mapped
    source: Mapped
    write_to: int
    """Where the next byte goes, in this process."""
    read_from: int
    left: int
    """Bytes."""


class Job:
    """One copy of one stream, from when it may begin until its last byte has arrived."""

    __slots__ = ("aborted", "begun", "finished", "moving", "parts", "ready_at", "segments")

    def __init__(self, segments: list[Segment], ready_at: int, finished: Callable[["Job", int], None]) -> None:
        self.segments, self.ready_at, self.finished = deque(segments), ready_at, finished
        self.parts = tuple(part for segment in segments for part in (segment.target, segment.source))
        """Mappings that the copy touches: none may be unmapped before it ends."""
        self.begun = False
        self.aborted = False
        self.moving = False
        """A worker moves bytes of it just now."""
        for part in self.parts:
            part.copies += 1

    def leave(self) -> None:
        """The copy touches its mappings no more."""
        for part in self.parts:
            part.copies -= 1
        self.parts = ()


class Lane:
    """One ordered pair of places."""

    def __init__(self, loop: Loop, rate: int, latency: float, settle: Callable[[Mapped], None]) -> None:
        self._loop, self._settle = loop, settle
        self._bytes_per_ns = rate / 1e9
        """0: as fast as this machine moves bytes."""
        self._latency = int(latency * 1e9)
        self._free_at = 0
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._draining = False
        self.hung = False
        self.factor = 1.0
        self.lie = ""

    def submit(self, job: Job) -> None:
        """Queue a copy, which may finish before this returns."""
        self._queue.append(job)
        if self._active is None:
            self._next()

    def resume(self) -> None:
        """After `hung` was cleared."""
        if self._active is None:
            self._next()

    def _next(self) -> None:
        # Short copies end inside `_begin`, which leads back here: the loop goes on with the next, the stack stays flat.
        if self._draining:
            return
        self._draining = True
        while self._queue and self._active is None and not self.hung:
            job = self._queue.popleft()
            if not job.aborted:
                self._active = job
                self._begin(job)
        self._draining = False

    def _begin(self, job: Job) -> None:
        segment = job.segments[0]
        begin = max(self._free_at, job.ready_at, now() - _CREDIT_NS)
        pace = self._bytes_per_ns / self.factor
        if not pace or pace > _FAST:
            inline = segment.left <= _FAST_COPY
            size = min(segment.left, _FAST_PIECE if inline else _FAST_MAX)
        else:
            size = min(segment.left, max(_PIECE_MIN, min(int(pace * _SLICE_NS), _PIECE_MAX)))
            inline = size <= _INLINE
        self._free_at = begin + (int(size / pace) if pace else 0) + (0 if job.begun else self._latency)
        job.begun = True
        if inline:
            self._move(segment, size)
            self._moved(job, size, now())
            return
        job.moving = True
        segment.target.allocation.pins += 1
        segment.source.allocation.pins += 1

        def work() -> None:
            self._move(segment, size)
            ended = now()
            self._loop.hand_back(lambda: back(ended))

        def back(ended: int) -> None:
            job.moving = False
            for part in (segment.target, segment.source):
                part.allocation.pins -= 1
                self._settle(part)
            self._moved(job, size, ended)

        self._loop.labour(work)

    def _move(self, segment: Segment, size: int) -> None:
        if self.lie == "drop":
            return
        _memmove(segment.write_to, segment.read_from, size)
        if self.lie == "corrupt":
            ctypes.c_ubyte.from_address(segment.write_to).value ^= 0xFF

    def _moved(self, job: Job, size: int, ended: int) -> None:
        segment = job.segments[0]
        segment.left -= size
        segment.write_to += size
        segment.read_from += size
        # Where moving the bytes took longer than the link would, the lane was busy for that long.
        if self._bytes_per_ns and ended > self._free_at:
            self._free_at = ended
        if job.aborted:
            self._active = None
            job.finished(job, ended)
            self._next()
        elif self._free_at > now():
            self._loop.call_at(self._free_at, lambda: self._arrived(job))
        else:
            self._arrived(job)

    def _arrived(self, job: Job) -> None:
        self._active = None
        if job.aborted:
            self._next()
            return
        if not job.segments[0].left:
            job.segments.popleft()
        if not job.segments:
            job.finished(job, self._free_at)
        elif job.segments[0].lane is self:
            self._queue.append(job)
            self._loop.ready.append(self._next)  # others get their turn between pieces
            return
        else:
            job.segments[0].lane.submit(job)
        self._next()
