"""The share: the lender's side. A GPU's own memory that is mapped as it is used and given back when it is not.

What the share does not use is really idle, and the agent may lend it. Growing again makes the agent take it back first,
so the owner never has less than its full static share. Growth beyond the share borrows, through the same object.
"""

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ema import arguments, errors
from ema_driver.errors import DriverError, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ema.pool import Pool
    from ema.region import Region
    from ema_driver.protocol import Address, Handle


AGAIN: Final = 0.005
"""Seconds until memory that was taken just before it could be mapped is asked for again."""


@dataclass(slots=True)
class Page:
    """One chunk of the client's own GPU memory. `view` is made when it is first asked for, which takes a call each."""

    address: "Address"
    handle: "Handle"
    view: memoryview | None = None


class Share:
    """`size` bytes of the client's own GPU at most, in pages of one chunk. Made by `Pool.share`. Thread-safe."""

    def __init__(self, pool: "Pool", size: int) -> None:
        self._pool = pool
        self.page_bytes = pool.chunk
        self.size = size
        """Bytes of the static share: whole pages."""
        self._pages: list[Page] = []
        self._lock = threading.Lock()
        self._views = threading.Lock()
        """Held while a page's view is made, so that no page goes meanwhile."""
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
        with self._views:
            page = self._page(index)
            if page.view is None:
                page.view = self._pool.view(int(page.address), self.page_bytes)
            if page.view is None:
                what = "this driver's memory is not mapped for the CPU; use the page's address on the GPU"
                raise errors.EmaError(what)
            return page.view

    def address(self, index: int) -> int:
        """Where a local page is mapped on the client's GPU."""
        return int(self._page(index).address)

    def _page(self, index: int) -> Page:
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
        end = time.monotonic() + timeout
        while True:
            self._pool.ask_share(self, own * self.page_bytes, max(0.0, end - time.monotonic()))
            try:
                self._map_own(own)
            except errors.OutOfMemory:
                # Somebody took the bytes that were just seen free: the agent takes more back, if anything is lent.
                if time.monotonic() >= end:
                    raise
                time.sleep(AGAIN)
            else:
                return

    def _map_own(self, own: int) -> None:
        driver, gpu = self._pool.driver, self._pool.gpu
        made: Sequence[Handle] = ()
        addresses: list[Address] = []
        try:
            made = driver.create_many(gpu, self.page_bytes, own - len(self._pages))
            addresses.extend(driver.reserve_many(self.page_bytes, len(made)))
            driver.map(list(zip(addresses, made, strict=True)))
        except DriverError as error:
            driver.unreserve(addresses)
            driver.release(made)
            self._pool.share_is()
            if isinstance(error, OutOfMemory):
                raise errors.OutOfMemory(str(error)) from error
            raise errors.EmaError(f"the driver refused: {error}") from error
        self._pages += [Page(a, h) for a, h in zip(addresses, made, strict=True)]
        self._pool.share_is()

    def _shrink_own(self, own: int) -> None:
        with self._views:
            gone, self._pages = self._pages[own:], self._pages[:own]
        if not gone:
            return
        for page in gone:
            if page.view is not None:
                page.view.release()
        driver = self._pool.driver
        driver.unmap([p.address for p in gone])
        driver.unreserve([p.address for p in gone])
        driver.release([p.handle for p in gone])
        self._pool.share_is()
