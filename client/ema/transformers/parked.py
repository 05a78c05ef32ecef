"""Tensors that lie on neighbours: stored once, fetched into fresh tensors, equal bit for bit."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ema import errors
from ema.transformers.pieces import Part, cut
from ema.transformers.staging import SLOT, Piece, Staging

if TYPE_CHECKING:
    from ema.pool import Pool

Move = Callable[[list[Part], torch.Tensor], None]
"""What to do with the parts of a piece and the bytes of its slot."""


class Parked:
    """Dense tensors of the pool's own GPU, stored on neighbours. Has a connection of its own until it is closed."""

    def __init__(self, pool: "Pool", tensors: Sequence[torch.Tensor], timeout: float, *, droppable: bool) -> None:
        """Borrow memory for them, at least one byte. When this raises, nothing is borrowed.

        Raises PoolFull when `timeout` seconds were not enough, LimitReached, AgentLost.
        """
        self._kinds = [(t.shape, t.dtype) for t in tensors]
        sizes = [t.nbytes for t in tensors]
        self.nbytes = sum(sizes)
        grain = pool.granularity
        self._slot = max(grain, min(SLOT, -(-self.nbytes // 2)) // grain * grain)
        self._pieces = cut(sizes, self._slot)
        self._staging = Staging(pool)
        try:
            self._region = self._staging.pool.region(self.nbytes, droppable=droppable, timeout=timeout)
        except BaseException:
            self._staging.close()
            raise

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        """Store them all: when this returns, they are stored.

        Raises OutOfMemory (no room for the slots, or to make a tensor dense), AgentLost, DataLost, and Reclaimed
        (droppable ones).
        """
        current, flat = -1, torch.empty(0)

        def fill(parts: list[Part], seen: torch.Tensor) -> None:
            nonlocal current, flat
            for part in parts:
                if part.tensor != current:  # parts come in the tensors' order: one with gaps is made dense once
                    current, flat = part.tensor, self._dense(tensors[part.tensor])
                seen[part.at : part.at + part.size].copy_(flat[part.start : part.start + part.size])

        self._staging.store(self._slot, self._through(fill))

    def fetch(self) -> list[torch.Tensor]:
        """Fresh tensors with the bytes, in the order given. They stay stored: if this raises, it may be called again.

        Raises OutOfMemory (no room for the tensors or the slots), AgentLost, DataLost, and Reclaimed (droppable ones).
        """
        self._region.check()
        try:
            made = [torch.empty(shape, dtype=dtype, device=self._staging.device) for shape, dtype in self._kinds]
        except torch.OutOfMemoryError as error:
            raise errors.OutOfMemory(f"{self.nbytes} bytes are to be fetched: {error}") from error
        flat = [_bytes(t) for t in made]

        def take(parts: list[Part], seen: torch.Tensor) -> None:
            for part in parts:
                to = flat[part.tensor][part.start : part.start + part.size]
                to.copy_(seen[part.at : part.at + part.size])

        self._staging.fetch(self._slot, self._through(take))
        return made

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        self._staging.close()

    def _through(self, move: Move) -> Iterator[Piece]:
        for number, parts in enumerate(self._pieces):
            yield Piece(self._region, number * self._slot, self._length(number), partial(move, parts))

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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
