"""Where bytes lie: extents of a linear space that grows and shrinks at its end."""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """`size` bytes from `at` on."""

    at: int
    size: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.at + self.size


class NoRoom(Exception):
    """Fewer bytes are free than were promised."""


class Arena:
    """Free and taken parts of `size` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[Extent] = []  # sorted, never touching each other

    @property
    def free(self) -> int:
        """Bytes."""
        return sum(extent.size for extent in self._free)

    def resize(self, size: int) -> None:
        """Make it `size` bytes; what goes must be free."""
        if size > self.size:
            grown = Extent(self.size, size - self.size)
            self.size = size
            self.give([grown])
            return
        kept = [Extent(e.at, min(e.end, size) - e.at) for e in self._free if e.at < size]
        if self.free - sum(e.size for e in kept) != self.size - size:
            raise ValueError(f"bytes beyond {size} of {self.size} are taken")
        self._free, self.size = kept, size

    def take(self, size: int, below: int | None = None) -> list[Extent]:
        """Take `size` bytes, the lowest that are free (before `below`). Raises NoRoom if there are fewer."""
        limit = self.size if below is None else below
        taken: list[Extent] = []
        left = size
        for part in self._free:
            used = min(left, part.size, limit - part.at)
            if not left or used <= 0:
                break
            taken.append(Extent(part.at, used))
            left -= used
        if left:
            raise NoRoom(f"{size} bytes are wanted before {limit}, {left} of them are not free")
        self._remove(taken)
        return taken

    def give(self, extents: Iterable[Extent]) -> None:
        """Give taken extents back."""
        for extent in extents:
            insort(self._free, extent)
        merged: list[Extent] = []
        for extent in self._free:
            if merged and merged[-1].end == extent.at:
                merged[-1] = Extent(merged[-1].at, merged[-1].size + extent.size)
            else:
                merged.append(extent)
        self._free = merged

    def _remove(self, taken: Iterable[Extent]) -> None:
        for part in taken:
            at = next(i for i, e in enumerate(self._free) if e.at <= part.at and part.end <= e.end)
            around = self._free.pop(at)
            rest = [Extent(around.at, part.at - around.at), Extent(part.end, around.end - part.end)]
            self._free[at:at] = [e for e in rest if e.size]


def parts(extents: Iterable[Extent], first: int, last: int) -> Iterator[tuple[int, Extent]]:
    """Of bytes laid out over extents in order, those from `first` to before `last`: where each part begins among the
    bytes, and its extent.
    """  # noqa: D205
    begin = 0
    for extent in extents:
        low, high = max(first, begin), min(last, begin + extent.size)
        if low < high:
            yield low, Extent(extent.at + low - begin, high - low)
        begin += extent.size
