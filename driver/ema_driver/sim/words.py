"""Pages of words on the caller's side: plain shared memory, futexes, and a doorbell for the device process."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from ema_driver import shared_memory
from ema_driver.errors import ContextLost
from ema_driver.page import Page
from ema_driver.sim import wire
from ema_driver.sim.channel import Channel
from ema_driver.sim.wire import ARMED, SLEPT

_RECHECK = 0.1
"""Seconds after which a waiting thread looks again: not everybody who stores wakes."""


class SimWords(Page):
    """A page of 32-bit words. Made by `SimDriver.words` and `SimDriver.adopt_words`."""

    def __init__(self, channel: Channel, number: int, count: int, fd: int, doorbell: int) -> None:
        """`fd` and `doorbell` become this object's."""
        super().__init__(fd, count)
        self.channel, self.number = channel, number
        self._doorbell = doorbell
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words = memoryview(self._map).cast("I")

    def load(self, index: int) -> int:
        """The word's value now."""
        if not (self._open and 0 <= index < self._count):
            self.check(index, 0)
        return self._words[index]

    def store(self, index: int, value: int) -> None:
        """Write the word, fence, wake."""
        self.check(index, value)
        self._words[index] = value
        shared_memory.wake(self._base + 4 * index)
        if self._words[ARMED]:
            self._ring()

    def fill(self, indices: Sequence[int], value: int) -> None:
        """`store` to many words; the device process is woken once."""
        if not indices:
            return
        self.check(min(indices), value)
        self.check(max(indices), value)
        words = self._words
        for index in indices:
            words[index] = value
        # The first wake is the fence. A thread that marks the page after it finds the new values before it sleeps.
        shared_memory.wake(self._base + 4 * indices[0])
        if words[SLEPT]:
            for index in indices[1:]:
                shared_memory.wake(self._base + 4 * index)
        if words[ARMED]:
            self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it has rung 2**64 times and nobody came: it will ring on
            os.eventfd_write(self._doorbell, 1)

    def wait(self, index: int, value: int, timeout: float) -> bool:
        """Block until the word equals `value`; False after `timeout` seconds."""
        self.check(index, value)
        address = self._base + 4 * index
        end = time.monotonic() + timeout
        self._words[SLEPT] = 1
        while (now := self._words[index]) != value:
            left = end - time.monotonic()
            if left <= 0:
                return False
            shared_memory.sleep_on(address, now, min(left, _RECHECK))
        return True

    def close(self) -> None:
        """Give the page up."""
        if self._open:
            self._open = False
            with suppress(ContextLost):  # the page went with the session
                self.channel.tell(wire.encode(wire.ClosePage(self.number)))
            self._words.release()
            self._map.close()
            os.close(self._fd)
            os.close(self._doorbell)
