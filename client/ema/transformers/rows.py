"""Tokens as rows: how a layer's keys and values lie in lent memory, so that more of them are just more bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NamedTuple, Self

import torch

ALIGNED: Final = 16
"""Keys and values of a row each begin at a multiple of this many bytes."""


class Kind(NamedTuple):
    """One token's keys (or values) in one layer."""

    shape: tuple[int, ...]
    """Sequences, heads, width."""
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that they take in a row."""
        return -(-self.size // ALIGNED) * ALIGNED

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Of keys or values: sequences, heads, tokens, width."""
        batch, heads, _, width = tensor.shape
        return cls((batch, heads, width), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of a layer, one row each: the keys of all sequences, then their values."""

    count: int
    key: Kind
    value: Kind

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return self.key.room + self.value.room

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.count * self.stride

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values of one sequence."""
        return (self.key.size + self.value.size) // max(1, self.key.shape[0])

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (sequences, heads, tokens, width) in these bytes, which they share."""
        rows = flat[: self.size].view(self.count, self.stride)
        keys, values = rows[:, : self.key.room], rows[:, self.key.room :]
        return _view(keys, self.key), _view(values, self.value)


def rows_of(keys: torch.Tensor, values: torch.Tensor) -> Rows:
    """The rows that hold these tokens."""
    return Rows(keys.shape[-2], Kind.of(keys), Kind.of(values))


def pack(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """These tokens' rows, as bytes. Raises torch.OutOfMemoryError."""
    rows = rows_of(keys, values)
    flat = torch.empty(rows.size, dtype=torch.uint8, device=keys.device)
    for to, source in zip(rows.views(flat), (keys, values), strict=True):
        to.copy_(source)
    return flat


def size_of(rows: Iterable[Rows]) -> int:
    """Bytes of all."""
    return sum(r.size for r in rows)


def count_of(rows: Iterable[Rows]) -> int:
    """Tokens of all."""
    return sum(r.count for r in rows)


def first(rows: tuple[Rows, ...], count: int) -> tuple[Rows, ...]:
    """The first so many tokens of them."""
    kept: list[Rows] = []
    for part in rows:
        if count <= 0:
            break
        kept.append(replace(part, count=min(part.count, count)))
        count -= part.count
    return tuple(kept)


def views_of(rows: Iterable[Rows], flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of rows that lie end to end in these bytes, which they share."""
    found = []
    for part in rows:
        found.append(part.views(flat))
        flat = flat[part.size :]
    return found


def _view(rows: torch.Tensor, kind: Kind) -> torch.Tensor:
    return rows[:, : kind.size].view(kind.dtype).unflatten(1, kind.shape).permute(1, 2, 0, 3)
