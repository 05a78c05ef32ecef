"""Tensors laid end to end: cut into pieces that each fill a slot, or packed whole into slots."""

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


def packed(sizes: Sequence[int], most: int) -> list[list[Part]]:
    """Pieces of `most` bytes at most, of whole tensors of these sizes in bytes, none of which is larger."""
    pieces: list[list[Part]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        if not pieces or size > room:
            pieces.append([])
            room = most
        pieces[-1].append(Part(tensor, 0, most - room, size))
        room -= size
    return pieces
