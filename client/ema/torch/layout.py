"""Where the bytes of each layer are: numbers only.

A layer's range is local memory up to a cut, and one of a few shared slots behind it. All layers are cut at the same
fraction, so that what is fetched is spread evenly over a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ALIGN: Final = 512
"""Bytes: where slices begin in the region."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer's remote part."""

    local: int
    """Bytes of the range before the cut."""
    size: int
    """Bytes behind the cut."""
    slot: int
    at: int
    """Offset in the region, in bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of all layers. Those that are whole in local memory are not in it."""

    order: tuple[int, ...]
    """Layers as they run in a step; one may run more than once."""
    slices: Mapping[int, Slice]
    slots: int
    slot_bytes: int
    remote: int
    """Bytes that are in no local memory but a slot's."""

    @property
    def window(self) -> int:
        """Bytes of the slots."""
        return self.slots * self.slot_bytes

    @property
    def region(self) -> int:
        """Bytes that the region needs."""
        return max((s.at + s.size for s in self.slices.values()), default=0)


def lay(sizes: Sequence[int], resident: float, *, order: Sequence[int], slots: int, grain: int) -> Layout:
    """Cut layers of these sizes (bytes) so that `resident` of each is local, to a multiple of `grain` and no less."""
    local = [min(n, -(-int(resident * n) // grain) * grain) for n in sizes]
    cut = [i for i in dict.fromkeys(order) if local[i] < sizes[i]]
    count = slots_for(len(cut), slots)
    slices, at = dict[int, Slice](), 0
    for position, i in enumerate(cut):
        slices[i] = Slice(local[i], sizes[i] - local[i], position % count, at)
        at = -(-(at + slices[i].size) // ALIGN) * ALIGN
    largest = max((s.size for s in slices.values()), default=0)
    return Layout(
        tuple(i for i in order if i in slices),
        slices,
        count,
        -(-largest // grain) * grain,
        sum(s.size for s in slices.values()),
    )


def slots_for(layers: int, slots: int) -> int:
    """How many slots: about as many as wished, but the last layer of a step and the first of the next share none."""
    if layers <= slots:
        return layers
    return next(n for n in range(slots, layers + 1) if n == 1 or layers % n != 1)
