"""The pool as a client sees it: one connection to the node's agent, and everything made from it."""

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

import msgspec

from ema import arguments, errors
from ema.link import BACKOFF, Link
from ema.program import Program
from ema.region import Region
from ema.runs import SLICE
from ema.share import Share
from ema.staging import Staging
from ema.window import Window
from ema_core import places, wire
from ema_core.wire import CopyStep
from ema_driver.errors import DriverError, OutOfMemory

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NAMES: Final = "1 to 63 letters, digits, '.', '_' or '-'"
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
        raise errors.BadInput("name", repr(name), _NAMES)
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


class Pool(Link):
    """A connection to the agent, and the way to everything. Thread-safe. Use as a context manager, or `close` it."""

    def __init__(self, path: str, hello: wire.Hello) -> None:
        self.staging = Staging(self)
        self._closing = threading.Lock()
        self._gone = False
        self._unsure: dict[int, None] = {}
        """Numbers of programs that were being opened when that was interrupted: the agent may have them."""
        self._unsure_regions: dict[int, None] = {}
        self._unsure_windows: dict[int, None] = {}
        """The same for regions, and for windows."""
        super().__init__(path, hello)

    def another(self, name: str = "") -> "Pool":
        """A connection of its own to the same agent, for the same GPU: with its own lease, and with its own streams.

        Copies of one connection run in order, so one that waits for its slot holds up what comes after it. What runs
        at its own pace (a model's weights, a cache) has its own connection. Raises AgentLost.
        """
        if name and not _NAME.fullmatch(name):
            raise errors.BadInput("name", repr(name), _NAMES)
        hello = msgspec.structs.replace(self._hello, gpu=self.gpu, name=name or self._hello.name)
        return Pool(self._path, hello)

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
            for number in [n for n in self._unsure_windows if n not in self._windows]:
                with suppress(errors.BadInput):  # the agent never got it
                    self.ask(lambda i, n=number: wire.CloseWindow(i, n))  # type: ignore[misc]
                del self._unsure_windows[number]
            number = _first_free(self._windows, wire.MAX_WINDOWS, "windows")
            first = _first_gap([range(w.first, w.first + len(w)) for w in self._windows.values()], slots)
            try:
                window = Window(self, number, first, slots, slot_bytes)
            except OutOfMemory as error:
                raise errors.OutOfMemory(str(error)) from error
            except DriverError as error:
                raise errors.EmaError(f"the driver refused the window: {error}") from error
            self._unsure_windows[number] = None
            try:
                self._hand_over(window)
            except BaseException as error:
                window.free()
                if isinstance(error, errors.EmaError):
                    del self._unsure_windows[number]
                raise
            self._windows[number] = window
            del self._unsure_windows[number]
            for slot in window.slots:
                # An earlier window's slot with this number may have been closed while it was full.
                slot.reset()
                self.orphans.discard(slot.number)
                self.unchecked.forget(slot.number)
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
            number = _first_free({**self._regions, **self._unsure_regions}, wire.MAX_REGIONS, "regions")
            region = Region(self, number, droppable=bool(droppable))
            self._regions[region.number] = region
            self._lost.pop(region.number, None)  # of an earlier region with this number
        try:
            region.grow(size, timeout)
        except BaseException as error:
            self.forget_region(region)
            if not isinstance(error, errors.EmaError):
                self._unsure_regions[number] = None
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
            number = _first_free({**self._programs, **self._unsure}, wire.MAX_PROGRAMS, "programs")
            self._unsure[number] = None
            try:
                answer = self.ask(lambda i: wire.OpenProgram(i, number, store, steps))
            except errors.EmaError:
                del self._unsure[number]
                raise
            program = Program(self, number, steps, answer.value if isinstance(answer, wire.Done) else 0)
            self._programs[number] = program
            del self._unsure[number]
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
        """Give everything back and disconnect. Twice is harmless; if it was interrupted, call it again."""
        if self._closing.acquire(blocking=False):
            try:
                if not self._gone:
                    self._close()
                    self._gone = True
            finally:
                self._closing.release()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
        self._stay_apart()
        self.runs.finished = errors.EmaError("this pool is closed")
        self._channel.close()
        # Who waits looks up at least every SLICE seconds, and must not find its page gone.
        self.measures.close(10 * SLICE)
        if self._share is not None:
            self._share.shrink(0)
        for window in list(self._windows.values()):
            with suppress(DriverError):  # freed in part by a close that was interrupted, or gone with its GPU
                window.free()
        self._windows.clear()
        for page in (self.shared, self._notice, *self._retired):
            page.close()
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_own(self) -> None:
        super()._forget_own()
        self.staging.forget()


def _first_free(taken: Mapping[int, object], most: int, what: str) -> int:
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
