"""Staging: buffers of the client's ordinary memory go to and from regions through two slots of the pool's own."""

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ema import errors
from ema.tickets import Ticket
from ema_driver.protocol import CpuVisible

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema.window import Slot, Window

SLOT: Final = 4 << 20
"""Bytes of one slot at most."""
PATIENCE: Final = 1.0
"""Seconds for copies under way to end after a failure."""


class Staging:
    """Two slots, made at first use. Thread-safe: one buffer at a time."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._window: Window | None = None

    def forget(self) -> None:
        """The window went with its GPU."""
        self._window = None

    def store(self, region: "Region", at: int, data: memoryview) -> None:
        """Copy a buffer to a region; ends when all is copied."""
        with self._lock:
            slots, tickets = self._slots(), list[Ticket]()
            try:
                for number, offset in enumerate(range(0, len(data), slots[0].size)):
                    slot, piece = slots[number % 2], data[offset : offset + slots[0].size]
                    slot.wait_empty()
                    self._put(slot, piece)
                    tickets.append(region.store(slot, at + offset, len(piece)))
                for slot in slots:
                    slot.wait_empty()
            except errors.EmaError:
                self._clear(tickets)
                raise

    def fetch(self, region: "Region", at: int, data: memoryview) -> None:
        """Fill a buffer from a region, one piece ahead; ends when all is there."""
        with self._lock:
            slots, tickets = self._slots(), list[Ticket]()
            pieces = [data[i : i + slots[0].size] for i in range(0, len(data), slots[0].size)]
            try:
                for number in range(len(pieces) + 1):
                    if number < len(pieces):
                        start = at + number * slots[0].size
                        tickets.append(region.fetch(start, slots[number % 2], len(pieces[number])))
                    if number:
                        slot = slots[(number - 1) % 2]
                        slot.wait()
                        pieces[number - 1][:] = self._get(slot, len(pieces[number - 1]))
                        slot.release()
            except errors.EmaError:
                self._clear(tickets)
                raise

    def _slots(self) -> "list[Slot]":
        if self._window is None:
            grain = self._pool.granularity
            self._window = self._pool.window(2, max(grain, min(self._pool.chunk, SLOT) // grain * grain))
        return self._window.slots

    def _clear(self, tickets: list[Ticket]) -> None:
        """After a failure in the middle: what is under way ends first, then the slots are empty for the next buffer."""
        for ticket in tickets:
            with suppress(errors.EmaError):
                ticket.wait(PATIENCE)
        for slot in self._slots():
            slot.reset()

    def _put(self, slot: "Slot", data: memoryview) -> None:
        if isinstance(self._pool.driver, CpuVisible):
            slot.view[: len(data)] = data
        else:
            self._pool.driver.write(slot.address, bytes(data))

    def _get(self, slot: "Slot", size: int) -> bytes | memoryview:
        driver = self._pool.driver
        return slot.view[:size] if isinstance(driver, CpuVisible) else driver.read(slot.address, size)
