"""Tensors laid end to end, and cut into pieces that each fill a slot."""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """What a piece has of one tensor, in bytes."""

    tensor: int
    """Its place among the tensors."""
    start: int
    """From where on in the tensor."""
    at: int
    """From where on in the piece."""
    size: int


def cut(sizes: Sequence[int], most: int) -> list[list[Part]]:
    """Pieces of `most` bytes, the last one of what is left, for tensors of these sizes in bytes."""
    pieces: list[list[Part]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                pieces.append([])
                room = most
            step = min(room, size - start)
            pieces[-1].append(Part(tensor, start, most - room, step))
            start, room = start + step, room - step
    return pieces
