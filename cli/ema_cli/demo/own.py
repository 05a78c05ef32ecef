"""Keys and values in the GPU's own share: pages that are there while they are used, and lent while they are not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import ema
from ema_cli.demo.arena import Arena, Extent, parts
from ema_cli.demo.pattern import Pattern

WEIGHTS = 0
"""The owner of the model's weights."""


@dataclass(slots=True, eq=False)
class Kept:
    """Bytes of one request; all amounts are real bytes."""

    owner: int
    size: int
    """Of all tokens that it will have; there is room for them, and extents are taken as tokens come."""
    borrowed: bool
    filled: int = 0
    """Of the tokens that it has by now."""
    written: int = 0
    """Of them in memory: in `extents`. The newest of a borrowed request are still in the model's workspace."""
    extents: list[Extent] = field(default_factory=list)


class Own:
    """The share's pages: first the weights, then keys and values."""

    def __init__(self, share: ema.Share, pattern: Pattern, weights: int) -> None:
        self.share, self._pattern = share, pattern
        self.page = share.page_bytes
        self._weights = weights // self.page
        self.arena = Arena()

    def load_weights(self) -> None:
        """Take the weights' pages and fill them."""
        self.share.grow(self._weights * self.page, timeout=10.0)
        for index in range(self._weights):
            self.share.page(index)[:] = self._pattern.bytes_of(WEIGHTS, index * self.page, self.page)

    def wrong_weights(self) -> int:
        """Bytes of the weights that are not what they were."""
        pages = ((index, self.share.page(index)) for index in range(self._weights))
        return sum(self._pattern.wrong(view, WEIGHTS, index * self.page) for index, view in pages)

    @property
    def grown(self) -> int:
        """Bytes that the share has for keys and values, whether they are used or not."""
        return max(0, self.share.local - self._weights * self.page)

    def wanted(self, size: int) -> int:
        """Size of the share when it has `size` bytes for keys and values."""
        return self._weights * self.page + size

    def look(self) -> None:
        """See what has grown."""
        if self.grown > self.arena.size:
            self.arena.resize(self.grown)

    def shrink(self, size: int, kept: Iterable[Kept]) -> None:
        """Keep only `size` bytes for keys and values; what lies beyond moves down first."""
        for one in kept:
            if any(extent.end > size for extent in one.extents):
                self._move(one, size)
        self.arena.resize(size)
        self.share.shrink(self.wanted(size))

    def write(self, kept: Kept, last: int) -> None:
        """Write the bytes up to `last`, as the model does when it computes them."""
        kept.extents += self.arena.take(last - kept.written)
        for begin, extent in parts(kept.extents, kept.written, last):
            self._put(extent, self._pattern.bytes_of(kept.owner, begin, extent.size))
        kept.written = last

    def room(self, kept: Kept, size: int) -> None:
        """Take room for bytes that come from elsewhere."""
        kept.extents += self.arena.take(size)
        kept.written += size

    def put(self, kept: Kept, at: int, data: bytes) -> None:
        """Write bytes that came from elsewhere."""
        done = 0
        for _, extent in parts(kept.extents, at, at + len(data)):
            self._put(extent, data[done : done + extent.size])
            done += extent.size

    def wrong(self, kept: Kept) -> int:
        """Bytes of a request that are not what was written."""
        wrong = 0
        for begin, extent in parts(kept.extents, 0, kept.written):
            for at, view in self._views(extent):
                wrong += self._pattern.wrong(view, kept.owner, begin + at)
        return wrong

    def _move(self, kept: Kept, limit: int) -> None:
        data = b"".join(bytes(view) for extent in kept.extents for _, view in self._views(extent))
        self.arena.give(kept.extents)
        kept.extents = self.arena.take(len(data), below=limit)
        self.put(kept, 0, data)

    def _put(self, extent: Extent, data: bytes) -> None:
        for at, view in self._views(extent):
            view[:] = data[at : at + len(view)]

    def _views(self, extent: Extent) -> Iterator[tuple[int, memoryview]]:
        """The extent's bytes page by page: where they begin within it, and the bytes."""
        at = extent.at
        while at < extent.end:
            index, offset = divmod(at, self.page)
            size = min(self.page - offset, extent.end - at)
            yield at - extent.at, self.share.page(self._weights + index)[offset : offset + size]
            at += size
