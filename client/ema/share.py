"""The share: the lender's side. A GPU's own memory that is mapped as it is used and given back when it is not.

What the share does not use is really idle, and the agent may lend it. Growing again makes the agent take it back first,
so the owner never has less than its full static share. Growth beyond the share borrows, through the same object.
"""

import threading
from typing import TYPE_CHECKING

from ema import arguments, errors
from ema_driver.errors import DriverError, OutOfMemory

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema_driver.protocol import Address, Handle


class Share:
    """`size` bytes of the client's own GPU at most, in pages of one chunk. Made by `Pool.share`. Thread-safe."""

    def __init__(self, pool: "Pool", size: int) -> None:
        self._pool = pool
        self.page_bytes = pool.chunk
        self.size = size
        """Bytes of the static share: whole pages."""
        self._pages: list[tuple[Address, Handle, memoryview | None]] = []
        self._lock = threading.Lock()
        self.closed = False
        self.beyond: Region | None = None
        """What was borrowed beyond the share; None while nothing is."""

    @property
    def local(self) -> int:
        """Bytes that are in use of the client's own GPU."""
        return len(self._pages) * self.page_bytes

    @property
    def borrowed(self) -> int:
        """Bytes that are in use beyond the share."""
        return self.beyond.size if self.beyond is not None else 0

    def page(self, index: int) -> memoryview:
        """A local page's bytes, where the driver maps them for the CPU."""
        view = self._page(index)[2]
        if view is None:
            raise errors.EmaError("this driver's memory is not mapped for the CPU; use the page's address on the GPU")
        return view

    def address(self, index: int) -> int:
        """Where a local page is mapped on the client's GPU."""
        return int(self._page(index)[0])

    def _page(self, index: int) -> "tuple[Address, Handle, memoryview | None]":
        return self._pages[arguments.whole("index", index, 0, len(self._pages) - 1)]

    def grow(self, size: int, timeout: float = 2.0) -> None:
        """Use `size` bytes in all: the share first, and beyond it borrowed memory.

        Raises OutOfMemory if even the share cannot be had, PoolFull or LimitReached if the rest cannot be borrowed;
        what was there before stays.
        """
        size, timeout = arguments.whole("size", size, 0), arguments.seconds("timeout", timeout)
        pages = -(-size // self.page_bytes)
        own = min(pages, self.size // self.page_bytes)
        with self._lock:
            if self.closed:
                raise errors.EmaError("this share is closed")
            if own > len(self._pages):
                self._grow_own(own, timeout)
            if (rest := pages - own) > 0:
                if self.beyond is None:
                    self.beyond = self._pool.region(rest * self.page_bytes, timeout=timeout)
                elif rest * self.page_bytes > self.beyond.size:
                    self.beyond.grow(rest * self.page_bytes, timeout)

    def shrink(self, size: int) -> None:
        """Use only `size` bytes in all: borrowed ones go first, then the last pages of the share."""
        pages = -(-arguments.whole("size", size, 0) // self.page_bytes)
        with self._lock:
            own = min(pages, len(self._pages))
            if self.beyond is not None:
                rest = max(0, pages - self.size // self.page_bytes) * self.page_bytes
                if rest == 0:
                    self.beyond.close()
                    self.beyond = None
                elif rest < self.beyond.size:
                    self.beyond.shrink(rest)
            self._shrink_own(own)

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        self.closed = True
        self.shrink(0)
        self._pool.forget_share(self)

    def _grow_own(self, own: int, timeout: float) -> None:
        driver, gpu = self._pool.driver, self._pool.gpu
        self._pool.ask_share(self, own * self.page_bytes, timeout)
        made: list[Handle] = []
        try:
            made.extend(driver.create(gpu, self.page_bytes) for _ in range(own - len(self._pages)))
        except OutOfMemory as error:
            driver.release(made)
            self._pool.share_is()
            raise errors.OutOfMemory(str(error)) from error
        except DriverError as error:
            driver.release(made)
            self._pool.share_is()
            raise errors.EmaError(f"the driver refused: {error}") from error
        addresses = [driver.reserve(self.page_bytes) for _ in made]
        driver.map(list(zip(addresses, made, strict=True)))
        view = self._pool.view
        self._pages += [(a, h, view(int(a), self.page_bytes)) for a, h in zip(addresses, made, strict=True)]
        self._pool.share_is()

    def _shrink_own(self, own: int) -> None:
        gone, self._pages = self._pages[own:], self._pages[:own]
        if not gone:
            return
        for _, _, view in gone:
            if view is not None:
                view.release()
        driver = self._pool.driver
        driver.unmap([a for a, _, _ in gone])
        driver.unreserve([a for a, _, _ in gone])
        driver.release([h for _, h, _ in gone])
        self._pool.share_is()
