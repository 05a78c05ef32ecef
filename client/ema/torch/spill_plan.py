"""What a step saves for its backward, and which of it is worth spilling: pure arithmetic, no torch.

A *step* here is one forward and its backward. What it saves is a sequence of storages of at least a minimum size, in
the order of their first save; backward uses them in an order of its own, mostly the reverse.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

ALIGNED: Final = 256
"""Items start at multiples of this many bytes of the region: copy engines are slower elsewhere."""
LARGEST_SLOT: Final = 128 << 20
"""Bytes of a slot on the way back at most: what is larger is cut."""
LARGEST_OUT: Final = 32 << 20
"""The same on the way out, where nothing stays."""
SHARE: Final = 16
"""The slots of one direction take at most this part of what is spilled."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """One step as it was seen."""

    sizes: tuple[int, ...]
    """Bytes of each saved storage, in the order of first save. Items below are indices into this."""
    order: tuple[int, ...]
    """The items that backward used, in the order of first use."""
    lasting: frozenset[int]
    """Items that were still in memory after the step (parameters, inputs, caches): to spill them frees nothing."""
    until: Mapping[int, int]
    """By item: the place in the order at which nobody used it any more. Without those that were used to the end."""
    forward: float = 0.0
    """Seconds from the step's begin to the first use of what was saved."""
    backward: float = 0.0
    """Seconds from there to the step's end."""

    def alike(self, other: "Learnt | None") -> bool:
        """Whether both saved and used the same, so that one static program serves both."""
        return other is not None and (self.sizes, self.order) == (other.sizes, other.order)

    def joined(self, other: "Learnt") -> "Learnt":
        """Two alike: what lasts in either, and each item for as long as either used it."""
        until = {i: max(place, other.until[i]) for i, place in self.until.items() if i in other.until}
        return replace(self, lasting=self.lasting | other.lasting, until=until)

    def passing(self, back: Sequence[int], ring: int) -> frozenset[int]:
        """Those of `back` that may stay in the slot that they come in: it is free again well before its next use."""
        place = {item: n for n, item in enumerate(self.order)}
        ends = [place[item] for item in back] + [len(self.order)] * ring
        return frozenset(
            item
            for n, item in enumerate(back)
            if self.until.get(item, len(self.order) + 1) <= ends[n + max(1, ring // 2)]
        )

    def spillable(self, ahead: int) -> list[int]:
        """Items that may be spilled, in the order of save.

        Not what outlives the step, and not the first `ahead` bytes that backward uses: while it uses those, the first
        fetches are under way.
        """
        passing = [i for i in self.order if i not in self.lasting]
        local = 0
        while passing and local < ahead:
            local += self.sizes[passing.pop(0)]
        return sorted(passing)

    def hidden(self, rate: int) -> int:
        """Bytes that hide behind the step on a link of `rate` bytes per second.

        Stores have the forward to hide behind, fetches the backward; a tenth is left for what is not even.
        """
        return int(0.9 * rate * min(self.forward, self.backward))


def rounded(size: int) -> int:
    """Bytes rounded up to whole words of 8, which are copied at once."""
    return -(-size // 8) * 8


def slot_size(sizes: Sequence[int], slots: int, granularity: int) -> int:
    """Bytes of a slot for items of these sizes: as large as the largest, but a small part of all of them together.

    Layers repeat; what is there but once (the last layer's output over a vocabulary) is cut instead.
    """
    often = [size for size, count in Counter(sizes).items() if count > 1] or sizes
    most = min(rounded(max(often)), LARGEST_SLOT, max(granularity, sum(sizes) // (SHARE * slots)))
    return -(-most // granularity) * granularity


def spread(sizes: Sequence[int], items: Sequence[int], wanted: int) -> list[int]:
    """Some of the items with at most `wanted` bytes in all, evenly over the step: so the link is busy all the time."""
    total = sum(sizes[i] for i in items)
    chosen: list[int] = []
    seen = taken = 0
    for i in items:
        seen += sizes[i]
        if (taken + sizes[i]) * total <= wanted * seen and taken + sizes[i] <= wanted:
            taken += sizes[i]
            chosen.append(i)
    return chosen


def places(sizes: Sequence[int], items: Sequence[int]) -> tuple[dict[int, int], int]:
    """Where in a region each item is, and how many bytes the region has."""
    at: dict[int, int] = {}
    end = 0
    for i in items:
        at[i] = end
        end += -(-sizes[i] // ALIGNED) * ALIGNED
    return at, end


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an item that goes through a slot at once."""

    item: int
    start: int
    """Offset in the item, bytes."""
    size: int
    at: int
    """Offset in the region, bytes."""
    slot: int
    """Index in the ring of slots."""


def pieces(
    sizes: Sequence[int], items: Sequence[int], at: Mapping[int, int], slots: int, slot_bytes: int
) -> list[Piece]:
    """The items in this order, cut to what fits a slot; slots are used in turn."""
    cut: list[Piece] = []
    for i in items:
        for start in range(0, sizes[i], slot_bytes):
            size = min(slot_bytes, sizes[i] - start)
            cut.append(Piece(i, start, size, at[i] + start, len(cut) % slots))
    return cut


def copies(cut: Sequence[Piece], chunk: int) -> int:
    """How many copies a program of these pieces makes: a piece that crosses chunks of the region makes several."""
    return sum((p.at + p.size - 1) // chunk - p.at // chunk + 1 for p in cut)
