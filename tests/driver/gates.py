"""Chunks behind gates: stable addresses whose backing is swapped while copies from and to them are queued."""

import time
from collections.abc import Sequence

from ema_core.ids import Place
from ema_driver.protocol import Address, Copy, Handle, MemoryDriver, Op, Stream, Wait, Words, Write

EMPTY, FULL = 0, 1
CLOSED, OPEN = 0, 1
LONGEST_COPY = 0.05
"""Seconds."""


class Chunks:
    """Private words per chunk: gate, busy per stream (fetch, store), dirty."""

    def __init__(self, driver: MemoryDriver, count: int, size: int, place: Place) -> None:
        self.driver, self.count, self.size = driver, count, size
        self.private = driver.words(count * 4)
        self.address = [driver.reserve(size) for _ in range(count)]
        self.handle = [driver.create(place, size) for _ in range(count)]
        driver.map(list(zip(self.address, self.handle, strict=True)))
        self.stage = driver.reserve(size)
        self.private.fill([self._gate(i) for i in range(count)], OPEN)
        self.reopened = 0

    def _gate(self, i: int) -> int:
        return 4 * i

    def _busy(self, i: int) -> tuple[int, int]:
        return 4 * i + 1, 4 * i + 2

    def fetch(self, shared: Words, slots: Sequence[int]) -> list[Op]:
        """Every chunk in turn into the slots, one word of `shared` per slot."""
        ops: list[Op] = []
        for i in range(self.count):
            slot, busy, gate = i % len(slots), self._busy(i)[0], self._gate(i)
            ops += [Wait(shared, slot, EMPTY), Wait(self.private, gate, OPEN), Write(self.private, busy, 1)]
            ops += [Wait(self.private, gate, OPEN), Copy(slots[slot], self.address[i], self.size)]
            ops += [Write(self.private, busy, 0), Write(shared, slot, FULL)]
        return ops

    def store(self, shared: Words, word: int, slot: int) -> list[Op]:
        """The slot into every chunk in turn."""
        ops: list[Op] = []
        for i in range(self.count):
            busy, gate = self._busy(i)[1], self._gate(i)
            ops += [Wait(shared, word, FULL), Wait(self.private, gate, OPEN), Write(self.private, busy, 1)]
            ops += [Wait(self.private, gate, OPEN), Write(self.private, 4 * i + 3, 1)]
            ops += [Copy(self.address[i], slot, self.size), Write(self.private, busy, 0), Write(shared, word, EMPTY)]
        return ops

    def take(self, i: int) -> None:
        """Close the gate and be certain that no copy touches the chunk."""
        while True:
            self.private.store(self._gate(i), CLOSED)
            end = time.monotonic() + LONGEST_COPY
            if all(self.private.wait(busy, 0, max(0.0, end - time.monotonic())) for busy in self._busy(i)):
                return
            self.private.store(self._gate(i), OPEN)  # the closing fell between the two waits of a copy
            self.reopened += 1
            time.sleep(1e-4)

    def swap(self, i: int, place: Place, side: Stream) -> None:
        """Move the chunk to another place behind its address. The gate is closed."""
        fresh = self.driver.create(place, self.size)
        self.driver.map([(self.stage, fresh)])
        side.enqueue([Copy(self.stage, self.address[i], self.size)])
        assert side.synchronize(10)
        self.driver.unmap([self.stage, self.address[i]])
        self.driver.release([self.handle[i]])
        self.driver.map([(self.address[i], fresh)])
        self.handle[i] = fresh

    def open(self, i: int) -> None:
        self.private.store(self._gate(i), OPEN)


def window(driver: MemoryDriver, place: Place, size: int) -> tuple[Address, Handle]:
    """Memory mapped at a fresh address."""
    address, handle = driver.reserve(size), driver.create(place, size)
    driver.map([(address, handle)])
    return address, handle


def let_pass(shared: Words, count: int, streams: Sequence[Stream], patience: float = 10) -> bool:
    """Hand slots over in a dead borrower's place until nothing is queued; False if something still is."""
    end = time.monotonic() + patience
    value = EMPTY
    while not all(stream.done() for stream in streams):
        if time.monotonic() > end:
            return False
        shared.fill(range(count), value)
        value = FULL - value
        time.sleep(1e-3)
    return True
