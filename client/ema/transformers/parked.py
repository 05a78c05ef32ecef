"""Tensors that lie on neighbours: stored once, fetched into fresh tensors, equal bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import torch

from ema import errors
from ema.torch.handover import handover
from ema.torch.memory import bytes_at, device_of
from ema.torch.order import order
from ema.transformers.pieces import cut

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.window import Slot

SLOT: Final = 16 << 20
"""Bytes of one of the two slots that everything passes through, at most."""

Seen = list[tuple["Slot", torch.Tensor]]
"""Slots and their bytes."""


class Parked:
    """Dense tensors of the pool's own GPU, stored on neighbours. Has a connection of its own until it is closed.

    Slots are waited for by the CPU, which can raise, and handed over in the order of torch's current stream: so bytes
    that did not arrive are never copied into a tensor.
    """

    def __init__(self, pool: "Pool", tensors: Sequence[torch.Tensor], timeout: float, *, droppable: bool) -> None:
        """Borrow memory for them, at least one byte. When this raises, nothing is borrowed.

        Raises PoolFull when `timeout` seconds were not enough, LimitReached, AgentLost.
        """
        self._device = device_of(pool)
        self._kinds = [(t.shape, t.dtype) for t in tensors]
        sizes = [t.nbytes for t in tensors]
        self.nbytes = sum(sizes)
        grain = pool.granularity
        self._slot = max(grain, min(SLOT, -(-self.nbytes // 2)) // grain * grain)
        self._pieces = cut(sizes, self._slot)
        self._pool = pool.another()
        try:
            self._hand, self._order = handover(self._pool), order(self._device)
            self._region = self._pool.region(self.nbytes, droppable=droppable, timeout=timeout)
        except BaseException:
            self._pool.close()
            raise

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        """Store them all: when this returns, they are stored.

        Raises OutOfMemory (no room for the slots, or to make a tensor dense), AgentLost, DataLost, and Reclaimed
        (droppable ones).
        """
        tickets = []
        current, flat = -1, torch.empty(0)
        with self._slots(full=True) as slots:
            for number, piece in enumerate(self._pieces):
                slot, seen = slots[number % 2]
                slot.wait_empty()
                for part in piece:
                    if part.tensor != current:  # parts come in the tensors' order: one with gaps is made dense once
                        current, flat = part.tensor, self._dense(tensors[part.tensor])
                    seen[part.at : part.at + part.size].copy_(flat[part.start : part.start + part.size])
                step = self._region.step(slot, number * self._slot, self._length(number))
                tickets.append(self._pool.run([step], store=True))
                self._hand.filled(slot)
            for ticket in tickets:
                ticket.wait()

    def fetch(self) -> list[torch.Tensor]:
        """Fresh tensors with the bytes, in the order given. They stay stored: if this raises, it may be called again.

        Raises OutOfMemory (no room for the tensors or the slots), AgentLost, DataLost, and Reclaimed (droppable ones).
        """
        self._region.check()
        try:
            made = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._kinds]
        except torch.OutOfMemoryError as error:
            raise errors.OutOfMemory(f"{self.nbytes} bytes are to be fetched: {error}") from error
        flat = [_bytes(t) for t in made]
        with self._slots(full=False) as slots:
            for number in range(len(self._pieces) + 1):
                if number < len(self._pieces):
                    self._region.fetch(number * self._slot, slots[number % 2][0], self._length(number))
                if number:
                    slot, seen = slots[(number - 1) % 2]
                    slot.wait()
                    for part in self._pieces[number - 1]:
                        to = flat[part.tensor][part.start : part.start + part.size]
                        to.copy_(seen[part.at : part.at + part.size])
                    self._hand.emptied(slot)
        return made

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        self._pool.close()

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return _bytes(tensor)
        except torch.OutOfMemoryError as error:
            raise errors.OutOfMemory(
                f"{tensor.nbytes} bytes with gaps between them are to be stored: {error}"
            ) from error

    def _length(self, number: int) -> int:
        last = self._pieces[number][-1]
        return last.at + last.size

    @contextmanager
    def _slots(self, *, full: bool) -> Iterator[Seen]:
        """Two slots, which take memory only while something moves. The agent waits for them to be `full`, or empty."""
        try:
            window = self._pool.window(2, self._slot)
        except errors.OutOfMemory:
            self._order.trim()
            window = self._pool.window(2, self._slot)
        seen: Seen = [(slot, bytes_at(self._pool, slot.address, slot.size)) for slot in window.slots]
        try:
            yield seen
        except BaseException:
            self._order.settle()
            for slot in window.slots:
                (slot.fill if full else slot.reset)()  # a copy that waits for it can end
            raise
        finally:
            self._order.settle()
            seen.clear()
            with suppress(errors.EmaError):  # then it goes with the connection
                window.close()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
