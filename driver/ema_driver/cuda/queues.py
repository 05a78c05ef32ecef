"""The hardware's queues: every CUDA stream that this process uses, made at once and used again and again.

Streams share the hardware queues of their process, so the sessions of one process share them too. All are made when the
GPU is first used, and each runs a small graph at once: what CUDA does the first time, it cannot do while some graph is
blocked in a wait. Seen on an H200: then making a stream, making a graph, or copying from ordinary memory blocks too.
"""

import ctypes
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

from ema_driver.cuda.api import Api, Raw
from ema_driver.cuda.gpus import Gpu
from ema_driver.errors import DriverError, InvalidUse

NODE: Final = 32
"""Streams per GPU of a node's session: as many as there can be hardware queues (CUDA_DEVICE_MAX_CONNECTIONS)."""
GUEST: Final = 8
"""Streams of a borrower's session: as many as there are hardware queues by default."""
_NON_BLOCKING: Final = 1
_UNTIMED: Final = 2
_EQUAL: Final = 1
_PORTABLE_AND_MAPPED: Final = 3
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """A CUDA stream, and an event to wait for it by."""

    stream: Raw
    event: Raw


class Queues:
    """The queues of one GPU in this process. `of` gives them to a session, which gives them back with `leave`."""

    _shared: ClassVar[dict[int, "Queues"]] = {}
    _lock: ClassVar = threading.Lock()

    def __init__(self, api: Api, count: int) -> None:
        """Make the streams, in the current context."""
        self._users = 0
        self._idle: list[Queue] = []
        for _ in range(count):
            stream = api.call("cuStreamCreate", _NON_BLOCKING)
            self._idle.append(Queue(stream, api.call("cuEventCreate", _UNTIMED)))
        self._count = count
        self._warm_up(api)

    def _warm_up(self, api: Api) -> None:
        """Run every kind of operation as a graph, once on every stream."""
        host = int(api.call("cuMemHostAlloc", _PIECE, _PORTABLE_AND_MAPPED))
        word = int(api.call("cuMemHostGetDevicePointer", host, 0))
        memory = int(api.call("cuMemAlloc", 2 * _PIECE))
        ctypes.memset(host, 0, _PIECE)
        for queue in self._idle:
            stream = queue.stream
            api.call("cuStreamBeginCapture", stream, api.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            api.call("cuStreamBatchMemOp", stream, 1, [_wait(api, word)], 0)
            for target, source in ((memory, host), (memory + _PIECE, memory), (host, memory)):
                api.call("cuMemcpyAsync", target, source, _PIECE, stream)
            api.call("cuStreamWriteValue32", stream, word, 0, 0)
            graph = api.call("cuStreamEndCapture", stream)
            executable = api.call("cuGraphInstantiate", graph, 0)
            api.call("cuGraphLaunch", executable, stream)
            api.call("cuGraphLaunch", executable, stream)
            api.call("cuMemsetD8Async", memory, 0, _PIECE, stream)
            api.call("cuEventRecord", queue.event, stream)
            api.call("cuStreamSynchronize", stream)
            api.call("cuGraphExecDestroy", executable)
            api.call("cuGraphDestroy", graph)
        api.call("cuMemFree", memory)
        api.call("cuMemFreeHost", host)

    @classmethod
    def of(cls, api: Api, gpu: Gpu, count: int) -> "Queues":
        """This GPU's queues; made now, `count` of them, if this is their first user."""
        with cls._lock, gpu.current():
            if gpu.ordinal not in cls._shared:
                cls._shared[gpu.ordinal] = cls(api, count)
            queues = cls._shared[gpu.ordinal]
            queues.join()
            return queues

    def join(self) -> None:
        """One more session uses these."""
        self._users += 1

    def take(self, gpu: Gpu) -> Queue:
        """One with nothing queued. Raises InvalidUse when all are taken."""
        with self._lock:
            if not self._idle:
                text = f"{gpu.id}: all {self._count} streams that run independently are open; close one first"
                raise InvalidUse(text)
            return self._idle.pop()

    def give(self, queue: Queue) -> None:
        """Take one back whose work has run."""
        with self._lock:
            self._idle.append(queue)

    def leave(self, api: Api, gpu: Gpu) -> None:
        """A session ends; with the last one the streams go."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            del self._shared[gpu.ordinal]
            with suppress(DriverError), gpu.current():
                for queue in self._idle:
                    api.call("cuEventDestroy", queue.event)
                    api.call("cuStreamDestroy", queue.stream)


def _wait(api: Api, word: int) -> Raw:
    made = api.cu.CUstreamBatchMemOpParams()
    part = made.waitValue
    part.operation = api.cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    part.address, part.value, part.flags = word, api.cu.cuuint32_t(0), _EQUAL
    return made
