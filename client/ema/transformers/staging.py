"""Bytes of tensors on their way to regions and back, through two slots of a connection of its own."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ema import errors
from ema.torch.handover import handover
from ema.torch.memory import bytes_at, device_of
from ema.torch.order import order

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema.window import Slot

SLOT: Final = 16 << 20
"""Bytes of one of the two slots that everything passes through, at most, unless one tensor needs more."""

Seen = list[tuple["Slot", torch.Tensor]]
"""Slots and their bytes."""


class Piece(NamedTuple):
    """What passes through a slot at once."""

    region: "Region"
    at: int
    """From where on in the region, in bytes."""
    size: int
    move: Callable[[torch.Tensor], None]
    """Writes a slot's bytes (uint8) before they are stored, or takes them when they were fetched."""


class Staging:
    """A connection to the agent, and two slots while something moves. Close it: that gives back all that it borrowed.

    Slots are waited for by the CPU, which can raise, and handed over in the order of torch's current stream: so bytes
    that did not arrive are never copied into a tensor.
    """

    def __init__(self, pool: "Pool") -> None:
        """Connect as `pool` is. Raises AgentLost."""
        self.device = device_of(pool)
        self.pool = pool.another()
        try:
            self._hand, self._order = handover(self.pool), order(self.device)
            self._session = self.pool.session
        except BaseException:
            self.pool.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the agent that lent to it is there, and it is not closed."""
        return self.pool.alive and self.pool.session == self._session

    def store(self, slot_bytes: int, pieces: Iterable[Piece]) -> None:
        """Store them all, through slots of so many bytes: when this returns, they are stored.

        Raises OutOfMemory (no room for the slots), AgentLost, DataLost, Reclaimed, and what `move` raises.
        """
        tickets = []
        with self._slots(slot_bytes, full=True) as slots:
            for number, piece in enumerate(pieces):
                slot, seen = slots[number % 2]
                self._order.settle()  # the slot's last store may not have been handed over yet
                slot.wait_empty()
                piece.move(seen)
                step = piece.region.step(slot, piece.at, piece.size)
                tickets.append(self.pool.run([step], store=True))
                self._hand.filled(slot)
            for ticket in tickets:
                ticket.wait()

    def fetch(self, slot_bytes: int, pieces: Iterable[Piece]) -> None:
        """Fetch them all, in order, one ahead.

        Raises OutOfMemory (no room for the slots), AgentLost, DataLost, Reclaimed, and what `move` raises: the pieces
        that were moved before that are as they should be.
        """
        before: Piece | None = None
        with self._slots(slot_bytes, full=False) as slots:
            for number, piece in enumerate(chain(pieces, (None,))):
                if piece is not None:
                    piece.region.fetch(piece.at, slots[number % 2][0], piece.size)
                if before is not None:
                    slot, seen = slots[(number - 1) % 2]
                    self._order.settle()  # nor may its last use be over
                    slot.wait()
                    before.move(seen)
                    self._hand.emptied(slot)
                before = piece

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        self.pool.close()

    @contextmanager
    def _slots(self, size: int, *, full: bool) -> Iterator[Seen]:
        """Two slots, which take memory only while something moves. The agent waits for them to be `full`, or empty."""
        try:
            window = self.pool.window(2, size)
        except errors.OutOfMemory:
            self._order.trim()
            window = self.pool.window(2, size)
        seen: Seen = [(slot, bytes_at(self.pool, slot.address, slot.size)) for slot in window.slots]
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
