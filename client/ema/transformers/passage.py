"""Bytes to and from a region, now: through two slots that are there only while something moves."""

from typing import TYPE_CHECKING

import torch

from ema import errors
from ema.torch.handover import handover
from ema.torch.memory import bytes_at
from ema.transformers.staging import SLOT

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema.tickets import Ticket
    from ema.torch.order import Order
    from ema.window import Window


class Passage:
    """Of a connection on which nothing else is under way.

    The CPU waits, and can raise. It waits for the end of copies, not for flags alone: a flag that a stream is to change
    says nothing before the stream has come that far.
    """

    def __init__(self, pool: "Pool", most: int, order: "Order") -> None:
        """For moves of up to `most` bytes. Raises OutOfMemory, AgentLost."""
        grain = pool.granularity
        self._pool, self._order, self._hand = pool, order, handover(pool)
        self._size = max(grain, min(SLOT, -(-most // 2)) // grain * grain)
        with torch.inference_mode(mode=False):
            self._window = roomy(pool, 2, self._size, order)
            self._slots = [(slot, bytes_at(pool, slot.address, slot.size)) for slot in self._window.slots]

    def store(self, region: "Region", at: int, flat: torch.Tensor) -> None:
        """Store bytes from `at` on: when this returns, they are stored. Raises AgentLost, DataLost."""
        tickets: list[Ticket] = []
        try:
            for number, part in enumerate(flat.split(self._size)):
                slot, seen = self._slots[number % 2]
                if number > 1:
                    tickets[-2].wait()
                seen[: len(part)].copy_(part)
                step = region.step(slot, at + number * self._size, len(part))
                tickets.append(self._pool.run([step], store=True))
                self._hand.filled(slot)
            for ticket in tickets[-2:]:
                ticket.wait()
        except BaseException:
            self._order.settle()
            for slot, _ in self._slots:
                slot.fill()  # a copy that waits for it can end
            raise

    def fetch(self, region: "Region", at: int, flat: torch.Tensor) -> None:
        """Fill `flat` with the bytes from `at` on, one piece ahead. Raises AgentLost, DataLost."""
        parts = flat.split(self._size)
        tickets: list[Ticket] = []
        try:
            for number in range(len(parts) + 1):
                if number < len(parts):
                    step = region.step(self._slots[number % 2][0], at + number * self._size, len(parts[number]))
                    tickets.append(self._pool.run([step], store=False))
                if number:
                    slot, seen = self._slots[(number - 1) % 2]
                    tickets[number - 1].wait()
                    parts[number - 1].copy_(seen[: len(parts[number - 1])])
                    self._hand.emptied(slot)
            self._order.settle()
        except BaseException:
            self._order.settle()
            for slot, _ in self._slots:
                slot.reset()
            raise

    def close(self) -> None:
        """Give the slots' memory back. Raises InUse while an interrupted copy is under way."""
        self._order.settle()
        self._slots.clear()
        self._window.close()


def roomy(pool: "Pool", slots: int, size: int, order: "Order") -> "Window":
    """A window, for which torch gives back what it keeps for later if need be. Raises OutOfMemory, AgentLost."""
    try:
        return pool.window(slots, size)
    except errors.OutOfMemory:
        order.trim()
        return pool.window(slots, size)
