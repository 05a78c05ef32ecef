"""`CudaDriver`: a session with NVIDIA GPUs."""

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ema_core.ids import HOST, GpuId, Place
from ema_driver import shared_memory
from ema_driver.cuda.api import Api, NoMemory, Raw
from ema_driver.cuda.gpus import Gpu, links, visible
from ema_driver.cuda.nvml import Nvml, plausible
from ema_driver.cuda.physical import CudaHandle, Physical, distinct
from ema_driver.cuda.queues import GUEST, NODE
from ema_driver.cuda.space import Space
from ema_driver.cuda.staging import Staging
from ema_driver.cuda.streams import EQUAL, CudaStream, Streams
from ema_driver.cuda.words import CudaWords
from ema_driver.errors import DriverError, DriverUnavailable, InvalidUse, OutOfMemory
from ema_driver.protocol import WORD_BYTES, Address, Device, Handle, HealthEvent, Link, MemoryInfo, Words

_MEMINFO: Final = Path("/proc/meminfo")
_RUN_OUT: Final = 2.0
"""Seconds that queued work may take to run out at the end of a session."""


class CudaDriver:
    """One session. `node` opens one that sees every GPU of this process, `guest_of` one that sees a borrower's own."""

    name = "cuda"
    most_copies = 240
    """Each takes two calls, and a GPU's queue about 1,000 before it blocks the thread that queues."""

    def __init__(self, api: Api, gpus: Sequence[Gpu], streams: int) -> None:
        self._api = api
        self._gpus: dict[Place, Gpu] = {gpu.id: gpu for gpu in gpus}
        self._home = gpus[0]
        self._nvml = Nvml.open([gpu.id for gpu in gpus])
        with self._home.current():
            self._physical = Physical(api, self._gpus, self._home)
        self._staging = Staging(api, self._home)
        self._space = Space(self._physical.granularity)
        self._queueing = threading.Lock()
        self._streams = {gpu.id: Streams(api, gpu, self._space, streams, self._queueing) for gpu in gpus}
        self._streams[self._home.id].prepare()
        self._links = links(gpus, self._nvml)
        self._devices = [gpu.describe(self._total(gpu)) for gpu in gpus]
        self._lock = threading.Lock()
        self._handles: set[CudaHandle] = set()
        self._pages: list[CudaWords] = []
        self._closed = False

    @classmethod
    def node(cls) -> Self:
        """A session with every GPU that can lend. Raises DriverUnavailable."""
        # Read by the driver when it starts, so it comes too late in a process that uses CUDA already.
        for queues in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
            os.environ.setdefault(queues, str(NODE))
        api = Api()
        return cls(api, visible(api), NODE)

    @classmethod
    def guest_of(cls, gpu: GpuId) -> Self:
        """A session with one GPU of this process. Raises DriverUnavailable."""
        api = Api()
        found = [g for g in visible(api) if g.id == gpu]
        if not found:
            raise DriverUnavailable(f"{gpu} is not visible in this process; see CUDA_VISIBLE_DEVICES and the container")
        return cls(api, found, GUEST)

    def devices(self) -> Sequence[Device]:
        """The GPUs this session can see, but for those that fell off the bus."""
        self._api.check()
        nvml = self._nvml
        return [d for d in self._devices if nvml is None or not nvml.lost(d.id)]

    def links(self) -> Sequence[Link]:
        """Claimed paths."""
        self._api.check()
        return list(self._links)

    def memory(self) -> Mapping[Place, MemoryInfo]:
        """Bytes of every visible GPU that answers, and of `HOST` (what Linux calls available counts as free)."""
        self._api.check()
        found = {place: self._memory_of(gpu) for place, gpu in self._gpus.items()}
        return {place: info for place, info in (*found.items(), (HOST, _host_memory())) if info is not None}

    def granularity(self, place: Place) -> int:  # noqa: ARG002  (the same everywhere)
        """Sizes are multiples of this many bytes."""
        return self._physical.granularity

    def create(self, place: Place, size: int) -> CudaHandle:
        """Take physical memory, zeroed. Raises OutOfMemory, DeviceLost, InvalidUse (size)."""
        self._check_size("create", size)
        if not self._physical.knows(place):
            raise InvalidUse(f"create: place {place!r}; must be host or one of {', '.join(self._gpus)}")
        with ExitStack() as undo, self._home.current():
            try:
                raw = self._physical.create(place, size)
                undo.callback(self._api.call, "cuMemRelease", raw)
                self._zero(raw, size, place)
            except NoMemory:
                info = self.memory().get(place)
                raise OutOfMemory(place, size, 0 if info is None else info.free) from None
            undo.pop_all()
        return self._keep(CudaHandle(place, size, raw, self._api))

    def create_many(self, place: Place, size: int, count: int) -> list[CudaHandle]:
        """Many pieces of memory, all or none. The driver makes them one by one."""
        if count < 0:
            raise InvalidUse(f"create: count {count}; must be 0 or more")
        made: list[CudaHandle] = []
        try:
            made.extend(self.create(place, size) for _ in range(count))
        except BaseException:
            self.release(made)
            raise
        return made

    def export(self, handle: Handle) -> int:
        """A new descriptor of the memory, close-on-exec; the caller closes it."""
        (own,) = distinct([handle], self._api, "export")
        with self._home.current():
            return self._physical.export(own.raw)

    def adopt(self, fd: int, size: int) -> CudaHandle:
        """Import memory from a descriptor, which stays the caller's. Raises InvalidUse."""
        self._check_size("adopt", size)
        with self._home.current():
            raw, place = self._physical.adopt(fd, size)
        return self._keep(CudaHandle(place, size, raw, self._api))

    def release(self, handles: Sequence[Handle]) -> None:
        """Give handles up, all or none. Mappings of them stay valid."""
        with self._lock:
            gone = [(handle, handle.raw) for handle in distinct(handles, self._api, "release")]
            for handle, _ in gone:
                handle.raw = None
                self._handles.discard(handle)
        with self._home.current():
            for _, raw in gone:
                self._api.call("cuMemRelease", raw)

    def reserve(self, size: int) -> Address:
        """Reserve an address range with nothing mapped in it."""
        self._check_size("reserve", size)
        with self._home.current():
            address = int(self._api.call("cuMemAddressReserve", size, self._physical.granularity, 0, 0))
        self._space.enter(address, size)
        return Address(address)

    def reserve_many(self, size: int, count: int) -> list[Address]:
        """Many ranges, all or none. The driver makes them one by one."""
        if count < 0:
            raise InvalidUse(f"reserve: count {count}; must be 0 or more")
        made: list[Address] = []
        try:
            made.extend(self.reserve(size) for _ in range(count))
        except BaseException:
            self.unreserve(made)
            raise
        return made

    def unreserve(self, addresses: Sequence[Address]) -> None:
        """Give address ranges up, all or none."""
        gone = self._space.leave(addresses)
        with self._home.current():
            for address, size in gone:
                self._api.call("cuMemAddressFree", address, size)

    def map(self, pairs: Sequence[tuple[Address, Handle]]) -> None:
        """Map each handle's whole memory at the address, for every GPU that reaches it; all or none."""
        taken = [(address, distinct([handle], self._api, "map")[0]) for address, handle in pairs]
        self._space.map([(address, handle.size) for address, handle in taken])
        with ExitStack() as undo, self._home.current():
            undo.callback(self._space.unmap, [address for address, _ in taken])
            for address, handle in taken:
                self._physical.map(address, handle.raw, handle.size, handle.place)
                undo.callback(self._api.call, "cuMemUnmap", address, handle.size)
                self._space.done(address)
            undo.pop_all()

    def unmap(self, addresses: Sequence[Address]) -> None:
        """Unmap what is at each address, all or none; under a copy it costs the session."""
        gone = self._space.unmap(addresses)
        with self._home.current():
            for address, size in gone:
                self._api.call("cuMemUnmap", address, size)

    def words(self, count: int) -> CudaWords:
        """A new page of at least `count` words, all zero."""
        if count <= 0:
            raise InvalidUse(f"words: count {count}; must be positive")
        size = -(-count * WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = shared_memory.sealed_memory("ema-words", size)
        return self._page(fd, size // WORD_BYTES)

    def adopt_words(self, fd: int, count: int) -> CudaWords:
        """A page that another process made; refused unless it is sealed against resizing and large enough."""
        if count <= 0:
            raise InvalidUse(f"words: count {count}; must be positive")
        if not shared_memory.is_sealed(fd):
            raise InvalidUse(f"words: descriptor {fd!r} is no memory file that is sealed against resizing")
        there = os.fstat(fd).st_size // WORD_BYTES
        if there < count:
            raise InvalidUse(f"words: count {count}; the page has {there}")
        return self._page(os.dup(fd), count)

    def stream(self, device: GpuId) -> CudaStream:
        """A stream on that GPU. Raises InvalidUse (no such GPU, too many streams)."""
        streams = self._streams.get(device)
        if streams is None:
            raise InvalidUse(f"stream: {device!r}; must be one of {', '.join(self._gpus)}")
        return streams.open()

    def wait_on(self, stream: int, page: Words, index: int, value: int) -> None:
        """Hold the caller's stream until the word equals `value`. Its context is current, as torch has it."""
        self._api.call("cuStreamWaitValue32", stream, self._word(page, index, value), value, EQUAL)

    def write_on(self, stream: int, page: Words, index: int, value: int) -> None:
        """Set the word to `value` when the caller's stream gets there."""
        self._api.call("cuStreamWriteValue32", stream, self._word(page, index, value), value, 0)

    def read(self, address: int, size: int) -> bytes:
        """Bytes from a mapped address, now."""
        pieces = list(self._space.pieces(address, size))
        found: list[bytes] = []
        self._streams[self._home.id].own(lambda own: found.extend(self._staging.read(own, pieces)))
        return b"".join(found)

    def write(self, address: int, data: bytes) -> None:
        """Bytes to a mapped address, now."""
        pieces = list(self._space.pieces(address, len(data)))
        self._streams[self._home.id].own(lambda own: self._staging.write(own, pieces, data))

    def zero(self, address: int, size: int) -> None:
        """Zero bytes at a mapped address, now."""
        self._fill(list(self._space.pieces(address, size)), self._home.id)

    def health(self) -> Sequence[HealthEvent]:
        """What NVML reported since the last call; nothing where there is no NVML."""
        return [] if self._nvml is None else self._nvml.health()

    def guest(self, device: GpuId) -> int:
        """Refused: a borrower reaches its GPU by itself (`guest_of`)."""
        raise InvalidUse(f"guest: a borrower opens its GPU {device} by itself")

    def close(self) -> None:
        """End the session; what it held is given back when this returns.

        Queued work runs out first, with its waits satisfied. If it cannot, memory that the GPU may still touch is left
        until this process ends: taking it away would cost every session of the process.
        """
        if self._closed:
            return
        self._closed = True
        settled = all(streams.settle(_RUN_OUT) for streams in self._streams.values())
        if settled:
            with suppress(DriverError):
                self._give_back()
            for gpu in self._gpus.values():
                gpu.close()
        else:
            for page in self._pages:
                page.hold()
        if self._nvml is not None:
            self._nvml.close()
        self._api.lost = self._api.lost or "the session is closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _word(self, page: Words, index: int, value: int) -> int:
        if not isinstance(page, CudaWords) or page.api is not self._api:
            raise InvalidUse(f"{page!r} is no page of this session")
        page.check(index, value)
        return page.pointer + WORD_BYTES * index

    def _give_back(self) -> None:
        for streams in self._streams.values():
            streams.leave()
        self._staging.close()
        for page in list(self._pages):
            page.close()
        mapped, ranges = self._space.everything()
        with self._home.current():
            for address, size in mapped:
                self._api.call("cuMemUnmap", address, size)
            for address, size in ranges:
                self._api.call("cuMemAddressFree", address, size)
            for handle in self._handles:
                self._api.call("cuMemRelease", handle.raw)
        self._handles.clear()

    def _keep(self, handle: CudaHandle) -> CudaHandle:
        with self._lock:
            self._handles.add(handle)
        return handle

    def _page(self, fd: int, count: int) -> CudaWords:
        try:
            page = CudaWords(self._api, self._home, fd, count, self._sweep)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._pages.append(page)
        self._sweep()
        return page

    def _sweep(self) -> None:
        """Free closed pages if nothing is queued: the driver waits for all that is (seen with blocked graphs).

        So while some stream waits for a silent client, closed pages pile up, at a few KiB each.
        """
        with self._queueing, self._lock:
            spent = [page for page in self._pages if page.spent]
            if spent and all(streams.quiet() for streams in self._streams.values()):
                for page in spent:
                    page.free()
                self._pages = [page for page in self._pages if page not in spent]

    def _zero(self, raw: Raw, size: int, place: Place) -> None:
        """Nothing promises that memory from CUDA is zero, and it may hold another lease's bytes."""
        call = self._api.call
        with ExitStack() as undo:
            address = call("cuMemAddressReserve", size, self._physical.granularity, 0, 0)
            undo.callback(call, "cuMemAddressFree", address, size)
            self._physical.map(address, raw, size, place)
            undo.callback(call, "cuMemUnmap", address, size)
            self._fill([(address, size)], GpuId(place) if place in self._gpus else self._home.id)

    def _fill(self, pieces: Sequence[tuple[int, int]], gpu: GpuId) -> None:
        """Zero mapped pieces, on that GPU's own stream."""

        def fill(stream: Raw) -> None:
            for address, size in pieces:
                self._api.call("cuMemsetD8Async", address, 0, size, stream)
            self._api.call("cuStreamSynchronize", stream)

        self._streams[gpu].own(fill)

    def _check_size(self, what: str, size: int) -> None:
        self._api.check()
        unit = self._physical.granularity
        if size <= 0 or size % unit:
            raise InvalidUse(f"{what}: size {size}; must be a positive multiple of {unit}")

    def _memory_of(self, gpu: Gpu) -> MemoryInfo | None:
        said = self._nvml.memory(gpu.id) if self._nvml is not None else None
        return gpu.memory() if said is None else said

    def _total(self, gpu: Gpu) -> int | None:
        said = self._memory_of(gpu)
        return None if said is None else said.total


def _host_memory() -> MemoryInfo | None:
    amounts = dict(line.split(":", 1) for line in _MEMINFO.read_text("ascii").splitlines())
    total, free = (int(amounts[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return plausible(total, 0, free)
