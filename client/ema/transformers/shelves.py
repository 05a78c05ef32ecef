"""Places on neighbours for blocks of equal size, which the pool may take back."""

from collections.abc import Container, Iterator
from itertools import count
from typing import TYPE_CHECKING, Final

from ema import errors
from ema.transformers.prefix_tree import Place
from ema.transformers.staging import Staging

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema.transformers.prefix_layout import Layout

WASTE: Final = 8
"""At most one byte of so many that are borrowed is of no use: a shelf is of whole chunks, and holds whole blocks."""


def shelf_bytes(chunk: int, block: int, most: int | None) -> int:
    """Bytes of a shelf for blocks of so many bytes: the fewest chunks that waste little, or all that `most` allows.

    Raises BadInput if `most` bytes are not enough for one block.
    """
    least = -(-block // chunk)
    if most is not None and most < least * chunk:
        raise errors.BadInput("limit", most, f"at least {least * chunk} bytes: one block, in whole chunks")
    size = next(n * chunk for n in count(least) if (n * chunk) % block * WASTE <= n * chunk)
    return size if most is None else min(size, most // chunk * chunk)


class Shelves:
    """Droppable regions of equal size, all of one connection. Close it: that gives all of them back."""

    def __init__(self, pool: "Pool", layout: "Layout", limit: int | None) -> None:
        """Connect as `pool` is; nothing is borrowed yet. Raises AgentLost, BadInput (`limit`: less than one block)."""
        self.layout, self._limit = layout, limit
        self._block = layout.nbytes
        self._size = shelf_bytes(pool.chunk, layout.nbytes, limit)
        self._regions: list[Region] = []
        self.staging = Staging(pool)

    @property
    def nbytes(self) -> int:
        """Bytes that are borrowed."""
        return sum(region.size for region in self._regions)

    def lost(self, place: Place) -> bool:
        """Whether the bytes at a place were taken back, or are lost. Raises AgentLost."""
        try:
            place.region.check()
            place.region.check_dropped(place.at, self._block)
        except (errors.Reclaimed, errors.DataLost):
            return True
        return False

    def free(self, taken: Container[Place]) -> Iterator[Place]:
        """Places that are there and not taken. Raises AgentLost."""
        for region in self._regions:
            yield from (p for p in self._places(region) if p not in taken and not self.lost(p))

    def more(self, timeout: float) -> Iterator[Place]:
        """Places in memory that is borrowed as they are asked for; ends when it is not to be had in `timeout` seconds.

        Raises AgentLost.
        """
        while self._limit is None or self.nbytes + self._size <= self._limit:
            try:
                self._regions.append(self.staging.pool.region(self._size, droppable=True, timeout=timeout))
            except (errors.PoolFull, errors.LimitReached, errors.InUse):
                return
            yield from self._places(self._regions[-1])

    def hurt(self) -> set["Region"]:
        """Those of which anything was taken back, or is lost. Raises AgentLost."""
        return {region for region in self._regions if not self._whole(region)}

    def keep_only(self, used: Container["Region"]) -> None:
        """Give the others back. Raises AgentLost."""
        for region in [r for r in self._regions if r not in used]:
            region.close()
            self._regions.remove(region)

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        self.staging.close()

    def _whole(self, region: "Region") -> bool:
        try:
            region.check()
        except errors.DataLost:
            return False
        return not self.staging.pool.drops(region)

    def _places(self, region: "Region") -> list[Place]:
        return [Place(region, at) for at in range(0, region.size - self._block + 1, self._block)]
