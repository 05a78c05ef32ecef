"""Keys and values of how prompts began, kept on neighbours: a prompt that begins alike is not computed again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Self

from ema import arguments, errors
from ema.torch.memory import device_of
from ema.transformers.cache import ElasticCache
from ema.transformers.prefix_input import keys_and_values, kinds_of, token_ids
from ema.transformers.prefix_layout import Layout
from ema.transformers.prefix_tree import Block, Place, Tree
from ema.transformers.shelves import Shelves

if TYPE_CHECKING:
    from array import array

    import torch
    import transformers

    from ema.pool import Pool
    from ema.transformers.prefix_input import Tokens


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What a store has done so far. All but `nbytes` are numbers of blocks."""

    blocks: int
    """Kept now."""
    nbytes: int
    """Bytes that are borrowed: whole chunks, and with the places of blocks that went."""
    hits: int
    """Fetched, and so not computed."""
    misses: int
    """Asked for, and not there."""
    evicted: int
    """Forgotten for newer ones."""
    reclaimed: int
    """Forgotten because they, or what they follow, were taken back by the pool or lost."""


class PrefixStore:
    """Blocks of tokens of one model, each known by all the tokens up to its end, on neighbours.

    They are droppable: the pool may take them back at any time, and then they are computed again. So what becomes of
    neighbours and agent is no error here: what is gone is not found. What is interrupted (Ctrl-C) leaves it empty.

    Has one connection to the agent, from the first block on. Not thread-safe. Use as a context manager, or `close` it.
    """

    def __init__(
        self,
        config: "transformers.PretrainedConfig",
        pool: "Pool",
        *,
        block: int = 256,
        limit: int | None = None,
    ) -> None:
        """`config` is the model's; blocks of `block` tokens, in at most `limit` borrowed bytes (None: what there is).

        Raises BadInput: a config that ElasticCache refuses.
        """
        self._layers = len(ElasticCache(config, pool))
        self._block = arguments.whole("block", block, 1, 1 << 20)
        self._limit = None if limit is None else arguments.whole("limit", limit, 1)
        self._config, self._pool = config, pool
        self._tree = Tree()
        self._shelves: Shelves | None = None
        self._closed = False
        self._hits = self._misses = self._evicted = self._reclaimed = 0

    def keep(
        self,
        tokens: "Tokens",
        cache: "transformers.Cache",
        *,
        salt: bytes = b"",
        timeout: float = 0.02,
    ) -> int:
        """Keep the whole blocks of these tokens that the cache holds; how many tokens of them are kept now.

        `tokens` (n,) or (1, n) are those that the cache was computed from, from the first on; both without padding.
        Where more memory is not to be had within `timeout` seconds (waited for once), the least recently used blocks
        make place; where there are none, it stops.

        Blocks are found with the same `salt` only. One for each tenant keeps others from learning by the clock what its
        prompts are; one for each adapter keeps its keys and values apart.

        Raises BadInput, OutOfMemory (no room for two slots), InUse (the cache is parked).
        """
        timeout = arguments.seconds("timeout", timeout)
        self._check_open()
        tensors = keys_and_values(cache, self._layers, device_of(self._pool))
        ids = token_ids(tokens, self._config)
        keys = self._keys(ids, salt, min(len(ids), *(t.shape[2] for t in tensors)))
        if not keys:
            return 0
        with self._never_half():
            self._store(keys, tensors, timeout)
        return len(self._tree.find(keys)) * self._block

    def resume(self, tokens: "Tokens", *, salt: bytes = b"") -> ElasticCache:
        """A fresh cache with as much of the beginning of these tokens as is kept, equal bit for bit.

        Its `get_seq_length()` tokens need not be computed; the last one of `tokens` always has to. Nothing found: it is
        empty. It is local, and the caller's to close. Needs memory for what it holds, and for two slots meanwhile.
        Raises BadInput, OutOfMemory (nothing is forgotten).
        """
        self._check_open()
        ids = token_ids(tokens, self._config)
        keys = self._keys(ids, salt, len(ids) - 1)
        cache = ElasticCache(self._config, self._pool)
        made: list[torch.Tensor] = []
        arrived: list[int] = []
        with self._never_half():
            if (shelves := self._shelves) is not None and (path := self._find(shelves, keys)):
                made = shelves.layout.room(len(path), shelves.staging.device)
                pieces = shelves.layout.fetched(made, [block.place for block in path], arrived)
                shelves.staging.fetch(shelves.layout.slot_bytes, pieces)
        if arrived:
            whole = [t[:, :, : len(arrived) * self._block] for t in made]
            for layer, k, v in zip(cache.layers, whole[::2], whole[1::2], strict=True):
                layer.lazy_initialization(k, v)
                layer.keys, layer.values = k, v
        self._hits += len(arrived)
        self._misses += len(keys) - len(arrived)
        return cache

    def report(self) -> PrefixReport:
        """What it has done so far."""
        nbytes = 0 if self._shelves is None else self._shelves.nbytes
        return PrefixReport(len(self._tree), nbytes, self._hits, self._misses, self._evicted, self._reclaimed)

    def clear(self) -> None:
        """Forget all blocks, and give everything back."""
        self._check_open()
        self._give_back()

    def close(self) -> None:
        """Forget all blocks, and give everything back. Twice is harmless."""
        self._closed = True
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PrefixStore({len(self._tree)} blocks of {self._block} tokens{', closed' if self._closed else ''})"

    def _store(self, keys: "Sequence[bytes]", tensors: "Sequence[torch.Tensor]", timeout: float) -> None:
        shelves = self._open_for(tensors)
        path = self._find(shelves, keys)
        new, places = keys[len(path) :], list[Place]()
        if not new:
            return
        self._sweep(shelves)  # what is gone makes place before what is there
        there = shelves.free({block.place for block in self._tree})

        def found() -> Iterator[Place]:
            for place in islice(chain(there, shelves.more(timeout), self._evict()), len(new)):
                places.append(place)
                yield place

        shelves.staging.store(shelves.layout.slot_bytes, shelves.layout.stored(tensors, len(path), found()))
        self._tree.add(path, new[: len(places)], places)

    def _open_for(self, tensors: "Sequence[torch.Tensor]") -> Shelves:
        kinds = kinds_of(tensors)
        if self._shelves is None:
            layout = Layout(kinds, self._block, self._pool.granularity)
            self._shelves = Shelves(self._pool, layout, self._limit)
        for number, (kind, before) in enumerate(zip(kinds, self._shelves.layout.kinds, strict=True)):
            if kind != before:
                raise errors.BadInput("cache", f"of {kind} in layer {number // 2}", f"{before}, as it was kept before")
        return self._shelves

    def _find(self, shelves: Shelves, keys: "Sequence[bytes]") -> list[Block]:
        path = self._tree.find(keys)
        if any(shelves.lost(block.place) for block in path):
            self._sweep(shelves)
            path = self._tree.find(keys)
        return path

    def _evict(self) -> Iterator[Place]:
        for block in self._tree.oldest():
            self._evicted += 1
            yield block.place

    def _sweep(self, shelves: Shelves) -> None:
        """Forget the blocks that are gone, and give back the shelves on which none is left."""
        if hurt := shelves.hurt():
            self._reclaimed += self._tree.prune(lambda b: b.place.region in hurt and shelves.lost(b.place))
        shelves.keep_only({block.place.region for block in self._tree})

    @contextmanager
    def _never_half(self) -> Iterator[None]:
        """Around what asks the agent: what is gone is forgotten, and what was interrupted leaves nothing behind."""
        try:
            if self._shelves is not None and not self._shelves.staging.alive:
                self._lose()
            try:
                yield
            except errors.Reclaimed:
                if self._shelves is not None:
                    self._sweep(self._shelves)
        except (errors.AgentLost, errors.DataLost):
            self._lose()
        except errors.EmaError:
            raise
        except BaseException:
            self._lose()
            raise

    def _lose(self) -> None:
        self._reclaimed += len(self._tree)
        self._give_back()

    def _give_back(self) -> None:
        self._tree.clear()
        if self._shelves is not None:
            self._shelves.close()
            self._shelves = None

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EmaError("this store is closed")

    def _keys(self, ids: "array[int]", salt: bytes, most: int) -> list[bytes]:
        """Of each whole block among the first `most` tokens."""
        if not isinstance(salt, bytes):
            raise errors.BadInput("salt", repr(salt)[:80], "bytes")
        starts = range(0, most - self._block + 1, self._block)
        keys = [ids[at : at + self._block].tobytes() for at in starts]
        return [salt + keys[0], *keys[1:]] if keys else []
