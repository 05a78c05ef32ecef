"""Pages of words that GPU and CPU share: sealed memory files, registered with the driver."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from ema_driver import shared_memory
from ema_driver.cuda.api import Api
from ema_driver.cuda.gpus import Gpu
from ema_driver.errors import ContextLost, DriverError
from ema_driver.page import Page
from ema_driver.protocol import WORD_BYTES

FIRST_PAUSE: Final = 20e-6
LAST_PAUSE: Final = 1e-3
"""Seconds between two looks at what a GPU may have written: its writes wake nobody."""
_PORTABLE_AND_MAPPED: Final = 3


class CudaWords(Page):
    """A page of 32-bit words. Made by `CudaDriver.words` and `CudaDriver.adopt_words`."""

    def __init__(self, api: Api, home: Gpu, fd: int, count: int, closed: Callable[[], None]) -> None:
        """`fd` becomes this object's; `closed` is called when it is closed. Raises DriverError."""
        super().__init__(fd, count)
        self._api, self._home = api, home
        self._size = os.fstat(fd).st_size
        self._base = shared_memory.map_shared(fd, self._size)
        try:
            with home.current():
                api.call("cuMemHostRegister", self._base, self._size, _PORTABLE_AND_MAPPED)
                self.pointer = int(api.call("cuMemHostGetDevicePointer", self._base, 0))
                """Where streams of every GPU find word 0 (one address for all: the registration is portable)."""
        except DriverError:
            shared_memory.unmap(self._base, self._size)
            raise
        self._words = (ctypes.c_uint32 * (self._size // WORD_BYTES)).from_address(self._base)
        self._closed = closed
        self._holds = 0

    @property
    def api(self) -> Api:
        """The session that this page belongs to."""
        return self._api

    def load(self, index: int) -> int:
        """The word's value now."""
        self.check(index, 0)
        return self._words[index]

    def store(self, index: int, value: int) -> None:
        """Write the word, fence, wake."""
        self.check(index, value)
        self._words[index] = value
        shared_memory.wake(self._base + WORD_BYTES * index)

    def fill(self, indices: Sequence[int], value: int) -> None:
        """`store` to many words."""
        for index in indices:
            self.check(index, value)
        for index in indices:
            self._words[index] = value
        for index in indices:
            shared_memory.wake(self._base + WORD_BYTES * index)

    def wait(self, index: int, value: int, timeout: float) -> bool:
        """Block until the word equals `value`; False after `timeout` seconds."""
        self.check(index, value)
        address = self._base + WORD_BYTES * index
        end = time.monotonic() + timeout
        pause = FIRST_PAUSE
        while (now := self._words[index]) != value:
            left = end - time.monotonic()
            if left <= 0:
                return False
            shared_memory.sleep_on(address, now, min(left, pause))
            pause = min(2 * pause, LAST_PAUSE)
        return True

    def close(self) -> None:
        """Give the page up. The GPU may still know it for a while (`CudaDriver` frees it when nothing is queued)."""
        if self._open:
            self._open = False
            os.close(self._fd)
            self._closed()

    @property
    def spent(self) -> bool:
        """Whether it is closed and no parked stream names it."""
        return not self._open and not self._holds

    def hold(self) -> None:
        """A parked stream names this page: taking it from under the GPU would cost the session."""
        self._holds += 1

    def let_go(self) -> None:
        """Undo `hold`."""
        self._holds -= 1

    def force(self, index: int, value: int) -> None:
        """Store even though the page is closed: to run a stream out at the session's end."""
        self._words[index] = value

    def free(self) -> None:
        """Unregister and unmap a spent page. Blocks while anything is queued in this process."""
        # Before the mapping goes: another mapping at the same address would be refused as registered already.
        with suppress(ContextLost), self._home.current():
            self._api.call("cuMemHostUnregister", self._base)
        shared_memory.unmap(self._base, self._size)
