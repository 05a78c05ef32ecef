"""The window: a few slots of the client's own GPU memory that the agent fills and empties.

Each slot has a flag in a page that client, agent and both sides' streams share. A fetch waits until the slot is empty
and leaves it full; a store waits until it is full and leaves it empty. Whoever uses a slot waits for it first and hands
it over afterwards, on the CPU (`wait`, `release`) or on a GPU stream (`flag`).
"""

import threading
import time
from typing import TYPE_CHECKING, Final

from ema import arguments, errors
from ema_core import wire
from ema_driver.errors import DriverError
from ema_driver.protocol import Handle, Words

if TYPE_CHECKING:
    from ema.link import Link

SLICE: Final = 0.1
"""Seconds of one wait, after which it is asked whether the agent still lives."""


class Slot:
    """One slot. `view` is its memory; `number` is its place among all slots of the pool."""

    def __init__(self, pool: "Link", number: int, size: int, view: memoryview | None, address: int) -> None:
        self._pool = self.pool = pool
        self.number = number
        self.size = size
        """Bytes."""
        self.closed = False
        self.address = address
        """Where the slot is mapped on the client's GPU."""
        self._view = view
        self._word = number * wire.SLOT_WORDS

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable, where the driver maps them for the CPU. Raises EmaError elsewhere."""
        self._check_open()
        if self._view is None:
            raise errors.EmaError("this driver's memory is not mapped for the CPU; use the slot's address on the GPU")
        return self._view

    @property
    def flag(self) -> tuple[Words, int]:
        """The page and word that a GPU stream waits for (`wire.FULL`) and sets (`wire.EMPTY`)."""
        return self._pool.shared, self._word + wire.SLOT_FLAG

    @property
    def full(self) -> bool:
        """Whether the slot holds bytes now."""
        self._check_open()
        return self._pool.shared.load(self._word + wire.SLOT_FLAG) == wire.FULL

    def wait(self, timeout: float | None = None, *, needed_at: float = 0.0) -> memoryview | None:
        """Wait until a fetch has filled the slot; its view, or None where there is none. The waiting is measured.

        Who has other work to do until `needed_at` (of `time.monotonic`) is exposed to waiting only from then on. Raises
        TimedOut, AgentLost, DataLost, and Reclaimed if what was fetched had been dropped.
        """
        self._until(wire.FULL, timeout, needed_at)
        try:
            self._pool.unchecked.check(self.number)
        except errors.Reclaimed:
            self.reset()
            raise
        return self._view

    def wait_empty(self, timeout: float | None = None, *, needed_at: float = 0.0) -> memoryview | None:
        """Wait until the slot is free to be written, as after a store; `needed_at` as in `wait`.

        Raises TimedOut, AgentLost, DataLost.
        """
        self._until(wire.EMPTY, timeout, needed_at)
        return self._view

    def release(self) -> None:
        """The bytes were used: the next fetch may overwrite them."""
        self._hand_over(wire.EMPTY)

    def fill(self) -> None:
        """The bytes were written: the next store may take them."""
        self._hand_over(wire.FULL)

    def reset(self) -> None:
        """Begin anew with an empty slot, after a failure."""
        self._check_open()
        self._pool.shared.store(self._word + wire.SLOT_FLAG, wire.EMPTY)

    def _check_open(self) -> None:
        if self.closed:
            raise errors.EmaError(f"the window of slot {self.number} is closed")

    def _hand_over(self, value: int) -> None:
        self._check_open()
        shared = self._pool.shared
        shared.store(self._word + wire.SLOT_USED, shared.load(self._word + wire.SLOT_COPIED))
        shared.store(self._word + wire.SLOT_FLAG, value)

    def _until(self, value: int, timeout: float | None, needed_at: float) -> None:
        timeout = arguments.patience("timeout", timeout)
        self._check_open()
        pool, word = self._pool, self._word + wire.SLOT_FLAG
        runs = pool.runs
        if runs.shared.load(word) == value:
            runs.believe()
            return
        began = time.monotonic()
        end = None if timeout is None else began + timeout
        pool.measures.begin_wait()
        try:
            while True:
                if pool.runs is not runs:
                    raise errors.AgentLost(f"the agent that was to hand slot {self.number} over is gone; fetch again")
                pool.check_slot(self.number)
                left = SLICE if end is None else min(SLICE, end - time.monotonic())
                if runs.shared.wait(word, value, max(0.0, left)):
                    runs.believe()
                    return
                if end is not None and time.monotonic() >= end:
                    raise errors.TimedOut(f"slot {self.number} was not handed over in {timeout} s")
        finally:
            pool.measures.end_wait()
            pool.measures.waited(max(0.0, time.monotonic() - max(began, needed_at)))


class Window:
    """Slots of equal size in one piece of memory. Close it to give the memory back."""

    def __init__(self, pool: "Link", number: int, first: int, slots: int, slot_bytes: int) -> None:
        self._pool = pool
        self.number, self.first, self.slot_bytes = number, first, slot_bytes
        self.size = slots * slot_bytes
        driver = pool.driver
        handle = driver.create(pool.gpu, self.size)
        try:
            self._address = driver.reserve(self.size)
            driver.map([(self._address, handle)])
        except DriverError:
            driver.release([handle])
            raise
        self._handle: Handle | None = handle
        view = pool.view(int(self._address), self.size)
        self.slots: list[Slot] = []
        for i in range(slots):
            at = i * slot_bytes
            part = None if view is None else view[at : at + slot_bytes]
            self.slots.append(Slot(pool, first + i, slot_bytes, part, int(self._address) + at))
        self._view = view
        self._lock = threading.Lock()

    @property
    def handle(self) -> Handle:
        """The memory. Raises EmaError after `close`."""
        if self._handle is None:
            raise errors.EmaError("this window is closed")
        return self._handle

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    def __len__(self) -> int:
        return len(self.slots)

    def close(self) -> None:
        """Give the window up. Raises InUse while a program uses it. Twice is harmless."""
        with self._lock:
            if self._handle is None:
                return
            self._pool.forget_window(self)
            self.free()

    def free(self) -> None:
        """Unmap and release the memory, when the agent has let go of it or is gone."""
        if self._handle is None:
            return
        driver = self._pool.driver
        for slot in self.slots:
            slot._view = None  # noqa: SLF001 - a window and its slots are one thing
            slot.closed = True
        if self._view is not None:
            self._view.release()
            self._view = None
        driver.unmap([self._address])
        driver.unreserve([self._address])
        driver.release([self._handle])
        self._handle = None
