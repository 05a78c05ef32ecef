"""What is mapped behind chunk addresses: the blocking driver work of granting, moving, dropping and giving back.

Everything here runs on a worker thread and touches neither ledger nor sockets. Each function leaves a chunk either as
it was or fully changed, or, when memory could not be mapped behind its address, not `mapped`: its bytes are in
`handle`, its gate stays closed, and `appear` tries again. On return the gates of other changed chunks are open unless
said otherwise. Order within a reclaim: close the gates, be certain, unmap and release (the lender has its bytes now),
map the new place, open.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ema_agent.gates import Gate, Gates
from ema_agent.host_stock import HostStock
from ema_agent.lease import Chunk
from ema_core.ids import HOST, GpuId, Place
from ema_driver.errors import DriverError
from ema_driver.protocol import Address, Copy, Handle, MemoryDriver, Stream

PATIENCE: Final = 5.0
"""Seconds that a copy under way may take before its link is given up as sick."""
COPY_LIMIT: Final = 10.0
"""Seconds for one batch of copies."""


class Held(DriverError):
    """A client's copy under way does not end: its link or device hangs, and the chunk cannot be touched."""


class Stuck(DriverError):
    """Our own copy did not end: its link hangs. Nothing has changed."""

    def __init__(self, size: int, *, adrift: bool) -> None:
        super().__init__(f"a copy of {size} bytes did not end in {COPY_LIMIT:g} s")
        self.adrift = adrift
        """The driver could not take it back: what it copies to may still change, at any time."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """Memory that nobody uses yet, mapped at a new address."""

    address: Address
    handle: Handle
    gate: Gate


class Backing:
    """Creates and swaps the memory of chunks through one driver session."""

    def __init__(self, driver: MemoryDriver, gates: Gates, home: GpuId) -> None:
        self._driver = driver
        self.gates = gates
        self._home = home
        self.stock = HostStock(driver)
        self._lock = threading.Lock()
        """Guards `_streams`: several worker threads are here at once."""
        self._streams: dict[GpuId, list[Stream]] = {}
        """Streams on which nothing is queued, for the next copies."""
        self._adrift: list[Handle] = []
        """What copies that were given up may still write to: nobody's until this process ends."""

    # --- making ---

    def fresh(self, place: Place, size: int, count: int) -> list[Fresh]:
        """Memory for `count` chunks at a place, mapped and open. Raises OutOfMemory, DeviceLost with nothing kept."""
        driver = self._driver
        handles = self._zeroed(place, size, count)
        addresses: Sequence[Address] = ()
        gates: list[Gate] = []
        try:
            addresses = driver.reserve_many(size, count)
            gates.extend(self.gates.new() for _ in handles)
            driver.map(list(zip(addresses, handles, strict=True)))
        except DriverError:
            driver.unreserve(addresses)
            self.stock.release(handles)
            for gate in gates:
                self.gates.give_back(gate)
            raise
        self.gates.open(gates)
        return [Fresh(*each) for each in zip(addresses, handles, gates, strict=True)]

    def discard(self, fresh: Sequence[Fresh]) -> None:
        """Give memory back that nobody came to use."""
        self._driver.unmap([f.address for f in fresh])
        self._driver.unreserve([f.address for f in fresh])
        self.stock.release([f.handle for f in fresh])
        for f in fresh:
            self.gates.give_back(f.gate)

    # --- taking ---

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Close the gates and be certain. Raises Held, with the gates open, if a copy under way does not end."""
        if self.gates.take([c.gate for c in chunks], PATIENCE):
            self.gates.open([c.gate for c in chunks])
            raise Held(f"a copy under way did not end in {PATIENCE:g} s: its link hangs")

    def vacate(self, chunks: Sequence[Chunk]) -> float:
        """Taken chunks: their memory on a GPU is free again, from the moment that is returned (monotonic seconds).

        Their twin, which is true, is all there is of them now; nothing is mapped at their addresses until `appear`.
        """
        old = [c.handle for c in chunks]
        self._unmap(chunks)
        for c in chunks:
            if c.twin is not None:
                c.handle, c.twin = c.twin, None
        self._driver.release(old)
        return time.monotonic()

    def appear(self, chunks: Sequence[Chunk]) -> DriverError | None:
        """Map chunks that are not: all, or as many as can be, and what kept the others from it."""
        try:
            self._map(chunks)
        except DriverError as error:
            last = error
        else:
            return None
        for c in chunks if len(chunks) > 1 else ():
            try:
                self._map([c])
            except DriverError as error:
                last = error
        return None if all(c.mapped for c in chunks) else last

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that cannot be mapped: their memory is free. Addresses and gates stay until `give_back`."""
        scratch = self.stock.scratch()
        self._driver.release([c.handle for c in chunks if c.handle.place != HOST])
        for c in chunks:
            if c.handle.place == HOST and id(c.handle) not in scratch:
                self.stock.keep(c.handle)
            if c.twin is not None:
                self.stock.keep(c.twin)
                c.twin = None

    def copy_to(self, chunks: Sequence[Chunk], target: Place) -> float:
        """Taken chunks: their bytes are copied to new memory at `target`, which then appears at the same addresses.

        The chunks are of one size. Returns the moment (monotonic seconds) from which the memory that they left is free.
        On a way up from host memory the host copy is kept as the twin. Raises OutOfMemory, DeviceLost or Stuck with
        nothing changed, or DriverError with chunks that are not `mapped`.
        """
        return self._to_host(chunks) if target == HOST else self._to_gpu(chunks, target)

    def _to_host(self, chunks: Sequence[Chunk]) -> float:
        stock, new = self.stock, list[Handle]()
        try:
            for c in chunks:
                new.append(c.twin or stock.take(c.size))
            copies = [Copy(int(s), int(c.address), c.size) for s, c in zip(stock.stages(new), chunks, strict=True)]
            self._copy(self._stream_home(*(c.handle.place for c in chunks)), copies)
        except DriverError as error:
            for c, h in zip(chunks, new, strict=False):
                self._unused(h, c, error)
            raise
        self._unmap(chunks)
        old = [c.handle for c in chunks if c.handle.place != HOST]
        for c, h in zip(chunks, new, strict=True):
            c.handle = h
            if h is c.twin:
                c.twin = None
        self._driver.release(old)  # mapping host memory takes long: the lender goes first
        free_from = time.monotonic()
        self._map(chunks)
        return free_from

    def _to_gpu(self, chunks: Sequence[Chunk], target: Place) -> float:
        driver, size = self._driver, chunks[0].size
        area = driver.reserve(size * len(chunks))
        stage = [Address(area + i * size) for i in range(len(chunks))]
        new: Sequence[Handle] = ()
        try:
            new = driver.create_many(target, size, len(chunks))
            driver.map(list(zip(stage, new, strict=True)))
        except DriverError:
            driver.unreserve([area])
            driver.release(new)
            raise
        try:
            home = self._stream_home(*(c.handle.place for c in chunks), target)
            self._copy(home, [Copy(int(s), int(c.address), size) for s, c in zip(stage, chunks, strict=True)])
        except DriverError as error:
            if isinstance(error, Stuck) and error.adrift:
                self._adrift += new
            else:
                driver.unmap(stage)
                driver.unreserve([area])
                driver.release(new)
            raise
        self._unmap(chunks)
        driver.unmap(stage)
        driver.unreserve([area])
        try:
            driver.map([(c.address, h) for c, h in zip(chunks, new, strict=True)])
        except DriverError:  # the target was lost just now: the bytes are still where they were
            driver.release(new)
            self._map(chunks)
            raise
        driver.release([c.handle for c in chunks if c.handle.place != HOST])
        free_from = time.monotonic()
        for c, h in zip(chunks, new, strict=True):
            previous, c.handle, c.mapped = c.handle, h, True
            if previous.place == HOST and c.droppable:
                self.stock.keep(previous)
            elif previous.place == HOST:
                c.twin = previous
                c.gate.mark_clean()
        return free_from

    def to_scratch(self, chunks: Sequence[Chunk], owner: str) -> float:
        """Taken chunks are given up: scratch memory of their own lease appears at their addresses.

        Returns the moment (monotonic seconds) from which their memory is free. Raises OutOfMemory with nothing changed
        if there is no host memory for the scratch, or DriverError with chunks that are not `mapped`.
        """
        driver = self._driver
        scratch = {size: self.stock.scratch_of(owner, size) for size in {c.size for c in chunks}}
        held = [c for c in chunks if c.mapped]
        self._unmap(held)
        driver.release([c.handle for c in held if c.handle.place != HOST])
        free_from = time.monotonic()
        for c in held:
            if c.handle.place == HOST:
                self.stock.keep(c.handle)
        for c in chunks:
            if c.twin is not None:
                self.stock.keep(c.twin)
                c.twin = None
            c.handle = scratch[c.size]
        self._map(chunks)
        return free_from

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Taken chunks that no queued operation names any more: all of their memory and addresses are free again."""
        driver = self._driver
        scratch = self.stock.scratch()
        held = [c for c in chunks if c.mapped]  # of the others only the address is left
        self._unmap(held)
        driver.release([c.handle for c in held if c.handle.place != HOST])
        driver.unreserve([c.address for c in chunks])
        for c in held:
            if c.handle.place == HOST and id(c.handle) not in scratch:
                self.stock.keep(c.handle)
        for c in chunks:
            if c.twin is not None:
                self.stock.keep(c.twin)
                c.twin = None
        # Where nothing could be mapped at the end of a session, a copy that CUDA still has queued must never pass.
        for c in held:
            self.gates.give_back(c.gate)

    # --- copying to a twin, with the gate open ---

    def make_twin(self, chunk: Chunk) -> bool:
        """Copy a lent chunk to host memory while it stays in use. False if a store came between: the twin is untrue.

        Raises DriverError if the copy failed; then the twin is untrue as well.
        """
        if not self.gates.clear_dirty(chunk.gate):
            return False
        copied = False
        twin = chunk.twin
        try:
            if twin is None:
                twin = self.stock.take(chunk.size)
            (stage,) = self.stock.stages([twin])
            self._copy(self._stream_home(chunk.place), [Copy(int(stage), int(chunk.address), chunk.size)])
            copied = not chunk.gate.dirty
        except DriverError as error:
            if twin is not None:
                self._unused(twin, chunk, error)
            raise
        else:
            if copied:
                chunk.twin = twin
            elif chunk.twin is None:
                self.stock.keep(twin)
        finally:
            if not copied:
                chunk.gate.mark_dirty()  # `clear_dirty` took the mark away
        return copied

    # --- inside ---

    def _map(self, chunks: Sequence[Chunk]) -> None:
        self._driver.map([(c.address, c.handle) for c in chunks])
        for c in chunks:
            c.mapped = True

    def _unmap(self, chunks: Sequence[Chunk]) -> None:
        self._driver.unmap([c.address for c in chunks])
        for c in chunks:
            c.mapped = False

    def _copy(self, home: GpuId, copies: Sequence[Copy]) -> None:
        """Copy on a stream of its own, behind no client's wait. Raises Stuck if it does not end, DriverError."""
        with self._lock:
            idle = self._streams.setdefault(home, [])
            stream = idle.pop() if idle else None
        if stream is None:
            stream = self._driver.stream(home)
        try:
            stream.enqueue(copies)
            ended = stream.synchronize(COPY_LIMIT)
        except DriverError:
            stream.close()
            raise
        if not ended:
            raise Stuck(sum(c.size for c in copies), adrift=not stream.close())
        with self._lock:
            idle.append(stream)

    def _unused(self, piece: Handle, chunk: Chunk, error: DriverError) -> None:
        """A copy of the chunk to a piece of host memory failed: another may use it, unless that copy is adrift."""
        if isinstance(error, Stuck) and error.adrift:
            self._adrift.append(piece)
            if piece is chunk.twin:
                chunk.twin = None
        elif piece is not chunk.twin:
            self.stock.keep(piece)

    def _zeroed(self, place: Place, size: int, count: int) -> list[Handle]:
        # Spare host memory holds another lease's bytes.
        spares = self.stock.take_spares(size, count) if place == HOST else []
        try:
            for stage in self.stock.stages(spares):
                self._driver.zero(stage, size)
            return [*spares, *self._driver.create_many(place, size, count - len(spares))]
        except DriverError:
            for spare in spares:
                self.stock.keep(spare)
            raise

    def _stream_home(self, *places: Place) -> GpuId:
        return next((GpuId(p) for p in places if p != HOST), self._home)
