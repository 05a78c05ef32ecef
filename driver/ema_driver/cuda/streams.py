"""Streams: CUDA streams with waits and writes on words, and graphs of such operations.

CUDA cannot drop what is queued. So a stream is given back when its queue is empty, and parked until then.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ema_driver.cuda.api import Api, Raw
from ema_driver.cuda.gpus import Gpu
from ema_driver.cuda.queues import Queue, Queues
from ema_driver.cuda.ready import CudaCalls, CudaGraph, Prepared
from ema_driver.cuda.space import Space
from ema_driver.cuda.words import FIRST_PAUSE, LAST_PAUSE, CudaWords
from ema_driver.errors import DriverError, InvalidUse
from ema_driver.protocol import WORD_BYTES, Copy, Op, Wait, Words, Write

EQUAL: Final = 1
MOST_TOGETHER: Final = 128
"""Waits and writes of one call (CUDA takes 256)."""
MOST_CALLS: Final = 128
"""Calls of one launch, above which it is a graph: a stream's queue takes about 1,000 before it blocks."""
_RELAXED: Final = "CU_STREAM_CAPTURE_MODE_RELAXED"

Call = tuple[str, Callable[[Raw], tuple[Raw, ...]]]
"""A driver function, and its arguments for a stream."""


class Streams:
    """The streams of one session on one GPU."""

    def __init__(self, api: Api, gpu: Gpu, space: Space, most: int, queueing: threading.Lock) -> None:
        self.api, self.gpu, self.space, self._most = api, gpu, space, most
        self.queueing = queueing
        """Held by whoever queues what may wait, and by whoever needs that nothing is queued."""
        self._lock = threading.Lock()
        self._own_lock = threading.Lock()
        self._queues: Queues | None = None
        self._own: Queue | None = None
        self._live: list[CudaStream] = []
        self._parked: list[CudaStream] = []

    def prepare(self) -> None:
        """Make the GPU's queues ready now instead of at the first use."""
        self.own(_nothing)

    def quiet(self) -> bool:
        """Whether nothing that a client of the session queued is left."""
        with self._lock:
            self._bury()
            return not self._parked and all(map(self._is_done, self._live))

    def open(self) -> "CudaStream":
        """A stream with nothing queued. Raises InvalidUse when all are taken."""
        with self._lock:
            self._bury()
            stream = CudaStream(self, self._take())
            self._live.append(stream)
            return stream

    def close(self, stream: "CudaStream") -> bool:
        """Take a stream back, now or when its queue has run; whether it has."""
        with self._lock:
            if stream in self._live:
                self._live.remove(stream)
                stream.hold_pages()
                self._parked.append(stream)
            self._bury()
            return stream not in self._parked

    def own(self, use: Callable[[Raw], None]) -> None:
        """Use the session's own stream, alone and with the GPU's context current: copies, zeroing, capturing."""
        with self._own_lock:
            if self._own is None:
                with self._lock:
                    self._own = self._take()
            with self.gpu.current():
                use(self._own.stream)

    def settle(self, patience: float) -> bool:
        """At the session's end: let every queue run out by force; whether all have within `patience` seconds."""
        end = time.monotonic() + patience
        turn = 0
        while True:
            with self._lock:
                waiting = [s for s in (*self._live, *self._parked) if not self._is_done(s)]
            if not waiting or self.api.lost:
                return True
            if time.monotonic() > end:
                return False
            for stream in waiting:
                stream.run_on(turn)
            turn += 1
            time.sleep(LAST_PAUSE)

    def leave(self) -> None:
        """Give all streams back. Call `settle` first."""
        with self._lock:
            self._parked += self._live
            for stream in self._live:
                stream.hold_pages()
            self._live.clear()
            self._bury()
            if self._queues is not None:
                if self._own is not None:
                    self._queues.give(self._own)
                self._queues.leave(self.api, self.gpu)

    def _take(self) -> Queue:
        if self._queues is None:
            self._queues = Queues.of(self.api, self.gpu, self._most)
        return self._queues.take(self.gpu)

    def _bury(self) -> None:
        for stream in [s for s in self._parked if self._is_done(s)]:
            self._parked.remove(stream)
            stream.let_pages_go()
            if self._queues is not None:
                self._queues.give(stream.queue)

    def _is_done(self, stream: "CudaStream") -> bool:
        try:
            with self.gpu.current():
                return self.api.done("cuStreamQuery", stream.queue.stream)
        except DriverError:
            return True  # it failed: nothing of it runs any more


class CudaStream:
    """A stream. Made by `CudaDriver.stream`."""

    def __init__(self, streams: Streams, queue: Queue) -> None:
        self.queue = queue
        self._streams, self._api, self._gpu = streams, streams.api, streams.gpu
        self._open = True
        self._waits: dict[tuple[CudaWords, int], list[int]] = {}
        """Every word that was ever waited for here, with the values."""
        self._pages: set[CudaWords] = set()

    def enqueue(self, ops: Sequence[Op]) -> None:
        """Append operations. Raises InvalidUse, NotMapped among it, before anything is queued."""
        self._check()
        with self._streams.space.steady():
            calls = self._calls(ops)
            with self._streams.queueing, self._gpu.current():
                for name, arguments in calls:
                    self._api.call(name, *arguments(self.queue.stream))

    def instantiate(self, ops: Sequence[Op]) -> CudaCalls | CudaGraph:
        """Make operations ready. What they name must be mapped now, and may be replaced later.

        Few of them stay calls that are made one after the other: nearly as cheap as a graph, and CUDA cannot make a
        graph while some other one is blocked in a wait (seen on an H200: it blocks until that goes on).
        """
        self._check()
        space = self._streams.space
        calls = self._calls(ops)
        spans = [(at, op.size) for op in ops if isinstance(op, Copy) for at in (op.target, op.source)]
        if len(calls) <= MOST_CALLS:
            ready = [(getattr(self._api.cu, name), of(self.queue.stream)) for name, of in calls]
            return CudaCalls(self, space, ready, spans)
        return self._graph(calls, spans)

    def _graph(self, calls: list[Call], spans: Sequence[tuple[int, int]]) -> CudaGraph:
        made: list[Raw] = []
        space = self._streams.space

        def capture(own: Raw) -> None:
            # On a stream of its own: whatever others queue meanwhile must not become part of the graph.
            api = self._api
            with space.steady():
                space.check(spans)
                api.call("cuStreamBeginCapture", own, getattr(api.cu.CUstreamCaptureMode, _RELAXED))
                try:
                    for name, arguments in calls:
                        api.call(name, *arguments(own))
                except DriverError:
                    api.cu.cuStreamEndCapture(own)
                    raise
                graph = api.call("cuStreamEndCapture", own)
            try:
                made.append(api.call("cuGraphInstantiate", graph, 0))
                # Otherwise the first launch would do it.
                api.call("cuGraphUpload", made[0], own)
            finally:
                api.cu.cuGraphDestroy(graph)

        self._streams.own(capture)
        return CudaGraph(self, made[0])

    def launch(self, executable: Raw) -> None:
        """Append a graph."""
        self._check()
        with self._streams.queueing, self._gpu.current():
            self._api.call("cuGraphLaunch", executable, self.queue.stream)

    def make(self, calls: Sequence[Prepared]) -> None:
        """Append operations by calls that are ready."""
        self._check()
        with self._streams.queueing, self._gpu.current():
            for function, arguments in calls:
                if code := function(*arguments)[0]:
                    raise self._api.error(function.__name__, int(code))

    def destroy_graph(self, executable: Raw) -> None:
        """Destroy a graph; one that runs is freed by the driver when it has run."""
        if not self._api.lost:
            with self._gpu.current():
                self._api.call("cuGraphExecDestroy", executable)

    def synchronize(self, timeout: float) -> bool:
        """Block until all that was queued before has run; False after `timeout` seconds."""
        self._check()
        api = self._api
        end = time.monotonic() + timeout
        # One event a stream: a second thread that waits too moves the mark further back in the queue, never ahead.
        event = self.queue.event
        with self._gpu.current():
            api.call("cuEventRecord", event, self.queue.stream)
            for pause in _pauses():
                if api.done("cuEventQuery", event):
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    break
                time.sleep(min(left, pause))
        return False

    def done(self) -> bool:
        """Whether everything queued so far has run."""
        self._check()
        with self._gpu.current():
            return self._api.done("cuStreamQuery", self.queue.stream)

    def close(self) -> bool:
        """Give the stream up. What is queued still runs when it is let go, and then this is False."""
        self._open = False
        return self._streams.close(self)

    def hold_pages(self) -> None:
        """This stream is parked: its pages must stay."""
        for page in self._pages:
            page.hold()

    def let_pages_go(self) -> None:
        """Undo `hold_pages`."""
        for page in self._pages:
            page.let_go()

    def run_on(self, turn: int) -> None:
        """Store what this stream may be waiting for, one value of each word a turn."""
        for (page, index), values in self._waits.items():
            page.force(index, values[turn % len(values)])

    def _check(self) -> None:
        self._api.check()
        if not self._open:
            raise InvalidUse("the stream is closed")

    def _calls(self, ops: Sequence[Op]) -> list[Call]:
        """The driver's calls: one for each copy, and one for all waits and writes between two, which run in order."""
        calls: list[Call] = []
        for is_copy, group in itertools.groupby(ops, lambda op: isinstance(op, Copy)):
            if is_copy:
                for op in group:
                    calls += self._copies(op)  # type: ignore[arg-type]
                continue
            words = [self._word(op) for op in group]  # type: ignore[arg-type]
            for at in range(0, len(words), MOST_TOGETHER):
                calls.append(_batch(words[at : at + MOST_TOGETHER]))
        return calls

    def _word(self, op: Wait | Write) -> Raw:
        """A wait or a write as the driver takes it."""
        page = self._page(op.page)
        page.check(op.index, op.value)
        self._pages.add(page)
        made = self._api.cu.CUstreamBatchMemOpParams()
        kinds = self._api.cu.CUstreamBatchMemOpType
        if isinstance(op, Wait):
            values = self._waits.setdefault((page, op.index), [])
            if op.value not in values:
                values.append(op.value)
            part, kind, flags = made.waitValue, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, EQUAL
        else:
            part, kind, flags = made.writeValue, kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, 0
        part.operation, part.address = kind, page.pointer + WORD_BYTES * op.index
        part.value, part.flags = self._api.cu.cuuint32_t(op.value), flags
        return made

    def _copies(self, op: Copy) -> Iterator[Call]:
        if op.size < 0:
            raise InvalidUse(f"copy: size {op.size}; must not be negative")
        space = self._streams.space
        done = 0
        for target, there in space.pieces(op.target, op.size):
            for source, size in space.pieces(op.source + done, there):
                at = target + (source - op.source - done)
                yield _copy(at, source, size)
            done += there

    def _page(self, page: Words) -> CudaWords:
        if not isinstance(page, CudaWords) or page.api is not self._api:
            raise InvalidUse(f"{page!r} is no page of this session")
        return page


def _batch(words: list[Raw]) -> Call:
    return "cuStreamBatchMemOp", lambda stream: (stream, len(words), words, 0)


def _copy(target: int, source: int, size: int) -> Call:
    return "cuMemcpyAsync", lambda stream: (target, source, size, stream)


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LAST_PAUSE)


def _nothing(_own: Raw) -> None:
    """The session's own stream is all that was wanted."""
