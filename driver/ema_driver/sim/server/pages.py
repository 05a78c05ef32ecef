"""Pages of words, as the device process sees them, and the streams that wait for one."""

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress

from ema_driver import shared_memory
from ema_driver.errors import InvalidUse
from ema_driver.sim.server.loop import Loop, now
from ema_driver.sim.wire import ARMED, HIDDEN_WORDS

_RECHECK_NS = 8_000_000
"""A store by somebody who rings no doorbell is seen this much later at most."""
PAGE_LIMIT = 64 << 20


class Page:
    """One page, shared by all sessions that registered it. Operations that name it keep it mapped."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("I")
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.users = 0
        self.waiting: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """Word index → (value waited for, what to call then)."""

    def check(self, index: int) -> None:
        """Let go whoever waits for the value that the word has now."""
        value = self.words[index]
        waiters = self.waiting[index]
        let_go = [resume for wanted, resume in waiters if wanted == value]
        if not let_go:
            return
        if len(let_go) == len(waiters):
            del self.waiting[index]
        else:
            self.waiting[index] = [waiter for waiter in waiters if waiter[0] != value]
        for resume in let_go:
            resume()

    def check_all(self) -> None:
        """`check` every word that is waited for."""
        for index in tuple(self.waiting):
            self.check(index)


class Pages:
    """All pages by the inode of their file."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._by_inode: dict[int, Page] = {}
        self._watched: set[Page] = set()
        self._ticking = False

    def register(self, fd: int, count: int) -> Page:
        """The page behind a descriptor. Raises InvalidUse."""
        if not shared_memory.is_sealed(fd):
            raise InvalidUse("words: the descriptor is no memory file sealed against resizing")
        stat = os.fstat(fd)
        needed = (count + HIDDEN_WORDS) * 4
        if stat.st_size % 4096 or not needed <= stat.st_size <= PAGE_LIMIT:
            raise InvalidUse(
                f"words: a file of {stat.st_size} bytes; {count} words need whole pages of 4096 bytes, {needed} bytes "
                f"or more, at most {PAGE_LIMIT}"
            )
        page = self._by_inode.get(stat.st_ino)
        if page is None:
            try:
                page = self._by_inode[stat.st_ino] = Page(fd)
            except OSError as error:
                raise InvalidUse(f"words: the file cannot be mapped for writing: {error}") from None
            self._loop.watch(page.doorbell, lambda: self._rang(page))
        page.users += 1
        return page

    def drop(self, page: Page) -> None:
        """A session gives the page up."""
        page.users -= 1
        if page.users == 0:
            self._by_inode = {inode: other for inode, other in self._by_inode.items() if other is not page}
            self._watched.discard(page)
            self._loop.forget(page.doorbell)
            os.close(page.doorbell)

    def park(self, page: Page, index: int, value: int, resume: Callable[[], None]) -> None:
        """Call `resume` once the word equals `value`."""
        page.waiting.setdefault(index, []).append((value, resume))
        if page not in self._watched and page.users:
            self._watched.add(page)
            # Armed first, fence, then look: a store that sees no arming is seen by this look.
            page.words[ARMED] = 1
            shared_memory.wake(page.base)
        page.check(index)
        if not self._ticking:
            self._ticking = True
            self._loop.call_at(now() + _RECHECK_NS, self._tick)

    def leave(self, page: Page, index: int, resume: Callable[[], None]) -> None:
        """Wait no longer."""
        left = [waiter for waiter in page.waiting.get(index, ()) if waiter[1] != resume]
        if left:
            page.waiting[index] = left
        else:
            page.waiting.pop(index, None)

    def _rang(self, page: Page) -> None:
        with suppress(BlockingIOError):  # a client may have read it away
            os.eventfd_read(page.doorbell)
        page.check_all()

    def _tick(self) -> None:
        for page in tuple(self._watched):
            page.check_all()
            if not page.waiting:
                self._watched.discard(page)
                page.words[ARMED] = 0
        self._ticking = bool(self._watched)
        if self._ticking:
            self._loop.call_at(now() + _RECHECK_NS, self._tick)
