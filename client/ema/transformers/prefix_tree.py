"""Which blocks of tokens are kept, each by all that came before it.

A tree, not a table of hashes: a block is found by its own tokens, compared in full, among those that follow its parent.
So no prompt is ever taken for another, and the same tokens after another parent are another block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ema.region import Region


class Place(NamedTuple):
    """Where a block's bytes are."""

    region: "Region"
    at: int
    """Bytes from the region's beginning."""


Blocks = dict[bytes, "Block"]
"""A block's tokens → the block."""


@dataclass(slots=True, eq=False)
class Block:
    """A block that is kept. Whatever follows it was used no later."""

    place: Place
    used: int
    """When, by the tree's own count."""
    following: Blocks = field(default_factory=dict)


class Tree:
    """Blocks of one model. What goes takes along what follows it. Not thread-safe."""

    def __init__(self) -> None:
        self._first: Blocks = {}
        self._now = 0

    def find(self, keys: Sequence[bytes]) -> list[Block]:
        """As much of this path as is kept, which counts as used now."""
        self._now += 1
        found: list[Block] = []
        following = self._first
        for key in keys:
            if (block := following.get(key)) is None:
                break
            block.used = self._now
            found.append(block)
            following = block.following
        return found

    def add(self, path: Sequence[Block], keys: Sequence[bytes], places: Sequence[Place]) -> None:
        """Keep blocks, one after the other, after a path that was just found."""
        following = path[-1].following if path else self._first
        for key, place in zip(keys, places, strict=True):
            block = following[key] = Block(place, self._now)
            following = block.following

    def prune(self, lost: Callable[[Block], bool]) -> int:
        """Forget what is lost and what follows it; how many blocks that were."""
        before = len(self)
        waiting = [self._first]
        while waiting:
            blocks = waiting.pop()
            for key in [key for key, block in blocks.items() if lost(block)]:
                del blocks[key]
            waiting += [block.following for block in blocks.values()]
        return before - len(self)

    def oldest(self) -> Iterator[Block]:
        """Forget one block after the other, least recently used first, those that follow before what they follow.

        Ends before what was used now.
        """
        order = [*self._walk()]
        # A parent was used no earlier, and the sort is stable: of those used together, what follows comes first.
        order.reverse()
        order.sort(key=lambda found: found[2].used)
        for blocks, key, block in order:
            if block.used == self._now:
                return
            del blocks[key]
            yield block

    def clear(self) -> None:
        """Forget all."""
        self._first = {}

    def __len__(self) -> int:
        return sum(1 for _ in self._walk())

    def __iter__(self) -> Iterator[Block]:
        return (block for _, _, block in self._walk())

    def _walk(self) -> Iterator[tuple[Blocks, bytes, Block]]:
        """Every block and where it is held, parents before those that follow."""
        waiting = [self._first]
        while waiting:
            blocks = waiting.pop()
            for key, block in blocks.items():
                yield blocks, key, block
                waiting.append(block.following)
