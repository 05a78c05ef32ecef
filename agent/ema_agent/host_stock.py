"""Host memory that no chunk has: spare pieces for the next copies, and the scratch memory that dropped chunks show.

Taking host memory costs 0.28 s per GiB, so what comes free is kept, up to a limit. Mapping it costs 13 ms per GiB, so
a piece that was once copied to stays mapped at an address of its own, its *stage*, beside the chunk's. A spare piece
holds some lease's bytes: it is overwritten whole, or zeroed, before anybody else can see it. Scratch memory belongs
to one lease.
"""

import threading
from collections.abc import Sequence

from ema_core.ids import HOST
from ema_driver.errors import DriverError
from ema_driver.protocol import Address, Handle, MemoryDriver


class HostStock:
    """Thread-safe: several worker threads are here at once."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._spare: dict[int, list[Handle]] = {}
        """By size."""
        self._scratch: dict[tuple[str, int], Handle] = {}
        """By lease and size."""
        self._stages: dict[int, tuple[Handle, Address]] = {}
        """By `id` of the handle, which lives as long as its entry."""
        self._lock = threading.Lock()

    @property
    def spare_bytes(self) -> int:
        """Host memory kept for later."""
        with self._lock:
            return sum(size * len(handles) for size, handles in self._spare.items())

    def take(self, size: int) -> Handle:
        """Memory of one chunk: a spare one, or a new one. Its bytes are anybody's: overwrite all of it first."""
        spares = self.take_spares(size, 1)
        return spares[0] if spares else self._driver.create(HOST, size)

    def stages(self, handles: Sequence[Handle]) -> list[Address]:
        """Where pieces are mapped for copies; nobody else may be at any of them. Raises DriverError."""
        with self._lock:
            new = [h for h in handles if id(h) not in self._stages]
        if new:
            addresses = self._driver.reserve_many(new[0].size, len(new))
            try:
                self._driver.map(list(zip(addresses, new, strict=True)))
            except DriverError:
                self._driver.unreserve(addresses)
                raise
            with self._lock:
                self._stages |= {id(h): (h, address) for h, address in zip(new, addresses, strict=True)}
        with self._lock:
            return [self._stages[id(h)][1] for h in handles]

    def release(self, handles: Sequence[Handle]) -> None:
        """Give pieces up, with their stages."""
        with self._lock:
            stages = [known[1] for h in handles if (known := self._stages.pop(id(h), None)) is not None]
        self._driver.unmap(stages)
        self._driver.unreserve(stages)
        self._driver.release(handles)

    def take_spares(self, size: int, count: int) -> list[Handle]:
        """Spare pieces, `count` at most. Their bytes are anybody's."""
        with self._lock:
            spare = self._spare.get(size, [])
            return [spare.pop() for _ in range(min(count, len(spare)))]

    def keep(self, handle: Handle) -> None:
        """Keep memory for the next chunk."""
        with self._lock:
            self._spare.setdefault(handle.size, []).append(handle)

    def trim(self, keep: int) -> None:
        """Give spare memory back beyond `keep` bytes."""
        with self._lock:
            over = sum(size * len(handles) for size, handles in self._spare.items()) - keep
            gone: list[Handle] = []
            for size, handles in self._spare.items():
                while handles and over > 0:
                    gone.append(handles.pop())
                    over -= size
        self.release(gone)

    def scratch_of(self, owner: str, size: int) -> Handle:
        """A lease's scratch memory. Raises OutOfMemory."""
        with self._lock:
            if (owner, size) not in self._scratch:
                self._scratch[owner, size] = self._driver.create(HOST, size)
            return self._scratch[owner, size]

    def scratch(self) -> frozenset[int]:
        """All scratch memory, which is no chunk's own, by `id` of its handle."""
        with self._lock:
            return frozenset(map(id, self._scratch.values()))

    def forget_scratch(self, owner: str) -> None:
        """The lease has ended: its scratch memory goes."""
        with self._lock:
            handles = [self._scratch.pop(k) for k in list(self._scratch) if k[0] == owner]
        self._driver.release(handles)
