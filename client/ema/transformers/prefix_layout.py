"""What a block of tokens holds of a model's keys and values, and how it passes through slots."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ema import errors
from ema.transformers.pieces import Part, packed
from ema.transformers.staging import SLOT, Piece

if TYPE_CHECKING:
    from ema.transformers.prefix_tree import Place

_ALIGNED: Final = 16
"""Bytes: whatever the types of two neighbours in a slot, each begins at a multiple of its own size."""


class Kind(NamedTuple):
    """Of the keys, or the values, of one layer."""

    heads: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.width} {self.dtype}"


class Layout:
    """Of each layer the keys, then the values: (heads, block, width), dense. The same for every block of a model."""

    def __init__(self, kinds: Sequence[Kind], block: int, grain: int) -> None:
        """For blocks of `block` tokens; slots are multiples of `grain` bytes."""
        self.kinds, self._block = tuple(kinds), block
        self._sizes = [k.heads * block * k.width * k.dtype.itemsize for k in kinds]
        sizes = [-(-size // _ALIGNED) * _ALIGNED for size in self._sizes]
        self.nbytes = sum(sizes)
        """Bytes of a block."""
        self.slot_bytes = -(-max(*sizes, min(SLOT, self.nbytes)) // grain) * grain
        self._pieces = packed(sizes, self.slot_bytes)

    def room(self, blocks: int, device: torch.device) -> list[torch.Tensor]:
        """Tensors (1, heads, tokens, width) for so many blocks. Raises OutOfMemory."""
        tokens = blocks * self._block
        try:
            return [torch.empty(1, k.heads, tokens, k.width, dtype=k.dtype, device=device) for k in self.kinds]
        except torch.OutOfMemoryError as error:
            raise errors.OutOfMemory(f"{blocks * self.nbytes} bytes are to be fetched: {error}") from error

    def stored(self, tensors: Sequence[torch.Tensor], first: int, places: Iterable["Place"]) -> Iterator[Piece]:
        """Pieces that store the tensors' blocks from number `first` on, each at its place."""

        def fill(block: int, parts: list[Part], seen: torch.Tensor) -> None:
            for part in parts:
                self._inside(part, seen).copy_(self._outside(tensors, part, block))

        for block, place in enumerate(places, first):
            for at, size, parts in self._at(place):
                yield Piece(place.region, at, size, partial(fill, block, parts))

    def fetched(
        self, tensors: Sequence[torch.Tensor], places: Iterable["Place"], arrived: list[int]
    ) -> Iterator[Piece]:
        """Pieces that fetch blocks into the tensors, one after the other. Whole ones are noted as `arrived`."""

        def take(block: int, parts: list[Part], seen: torch.Tensor) -> None:
            for part in parts:
                self._outside(tensors, part, block).copy_(self._inside(part, seen))
            if parts is self._pieces[-1]:
                arrived.append(block)

        for block, place in enumerate(places):
            for at, size, parts in self._at(place):
                yield Piece(place.region, at, size, partial(take, block, parts))

    def _at(self, place: "Place") -> Iterator[tuple[int, int, list[Part]]]:
        at = place.at
        for parts in self._pieces:
            size = parts[-1].at + parts[-1].size
            yield at, size, parts
            at += size

    def _inside(self, part: Part, seen: torch.Tensor) -> torch.Tensor:
        kind = self.kinds[part.tensor]
        dense = seen[part.at : part.at + self._sizes[part.tensor]].view(kind.dtype)
        return dense.view(kind.heads, self._block, kind.width)

    def _outside(self, tensors: Sequence[torch.Tensor], part: Part, block: int) -> torch.Tensor:
        return tensors[part.tensor][0, :, block * self._block : (block + 1) * self._block]
