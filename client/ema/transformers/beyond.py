"""Keys and values beyond the local budget: stored once, and fetched at each call of the model, layer by layer.

Each layer's tokens lie end to end in a region of its own, so more of them are stored behind the others, and a layer is
one copy. While nothing is added, a program fetches all layers, the first ones for the next call already. Whatever else
is to be done comes seldom, and is done at once with the CPU's waits: then the program and its slots are given up, and
made anew when a layer is wanted next.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import torch

from ema import errors
from ema.torch.memory import device_of
from ema.torch.order import order
from ema.transformers.passage import Passage
from ema.transformers.rows import Rows, size_of, views_of
from ema.transformers.slots import Slots
from ema_core import wire

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region

RESET: Final = "reset() the cache and compute it again"


class Stored(Protocol):
    """A layer."""

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Its tokens that lie on neighbours."""
        ...


class Beyond:
    """The remote part of a cache, on a connection of its own until it is closed. Not thread-safe."""

    def __init__(self, pool: "Pool", layers: Sequence[Stored], timeout: float) -> None:
        """Nothing is borrowed yet. `timeout`: seconds to wait for memory."""
        self._pool, self._layers, self._timeout = pool, layers, timeout
        self._device = device_of(pool)
        self._order = order(self._device)
        self._regions: dict[int, Region] = {}
        self._numbers: tuple[int, ...] = ()
        """Of the regions. Replaced at once: a thread of its own looks at it."""
        self._slots: Slots | None = None
        self._passage: Passage | None = None
        self._connection: Pool | None = None

    # --- the way of each call of the model ---

    def take(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the layer's rows, true until `done` in the order of the computation.

        Raises AgentLost, DataLost, OutOfMemory (no room for the slots).
        """
        slots = self._slots
        if slots is None or slots.rows[layer] is not self._layers[layer].rows:
            slots = self._fill_slots()
        slots.feed.take(layer)
        return slots.views[layer]

    def done(self, newest: torch.Tensor) -> None:
        """They have been used. `newest`: values, made NaN if what was taken is not to be believed."""
        if (slots := self._slots) is not None:
            slots.feed.done()
            if slots.poison is not None:
                slots.poison(newest)

    # --- what comes seldom ---

    def reserve(self, sizes: Mapping[int, int]) -> None:
        """Borrow so many bytes for each layer; all of them, or nothing changes.

        Raises PoolFull, LimitReached, AgentLost, DataLost.
        """
        copies = sum(-(-size // self._pool.chunk) for size in sizes.values())
        if copies > wire.MAX_COPIES:
            raise errors.LimitReached(
                f"remote tokens would lie in {copies} chunks of {self._pool.chunk} bytes; {wire.MAX_COPIES} are the "
                f"most that one call of the model can fetch: a pool of larger chunks holds more"
            )
        if self._connection is None:
            self._connection = self._pool.another()
        self.check()
        before = {layer: region.size for layer, region in self._regions.items()}
        end = time.monotonic() + self._timeout
        try:
            for layer, size in sizes.items():
                left = max(0.0, end - time.monotonic())
                if (region := self._regions.get(layer)) is None:
                    self._regions[layer] = self.connection.region(size, timeout=left)
                else:
                    region.grow(size, left)
            self._numbers = tuple(r.number for r in self._regions.values())
        except BaseException:
            for layer, region in list(self._regions.items()):
                with suppress(errors.EmaError):  # then it goes with the connection
                    region.shrink(before.get(layer, 0))
                if layer not in before:
                    del self._regions[layer]
            raise

    def store(self, layer: int, at: int, flat: torch.Tensor) -> None:
        """Put bytes behind the first `at` of a layer, and wait until they are stored. Raises AgentLost, DataLost."""
        with self._moving() as passage:
            passage.store(self._regions[layer], at, flat)

    def fetch(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the layer's rows in fresh memory. Raises AgentLost, DataLost, OutOfMemory."""
        rows = self._layers[layer].rows
        with self._moving() as passage:
            flat = torch.empty(size_of(rows), dtype=torch.uint8, device=self._device)
            passage.fetch(self._regions[layer], 0, flat)
        return views_of(rows, flat)

    def moved(self) -> None:
        """Nothing more is stored or fetched at once for now: give back the memory that it took."""
        passage, self._passage = self._passage, None
        if passage is not None:
            with suppress(errors.EmaError):  # then it goes with the connection
                passage.close()

    def rest(self) -> None:
        """Give all local memory back until a layer is wanted."""
        self.moved()
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()

    def check(self) -> None:
        """Raise AgentLost or DataLost if anything that was lent is gone."""
        connection = self.connection
        if connection.session != 1:
            raise errors.AgentLost(f"keys and values went with the agent that had lent their memory: {RESET}")
        connection.check_alive()
        connection.runs.believe()
        connection.check_lost(self._numbers)

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        try:
            self.rest()
        finally:
            if self._connection is not None:
                self._connection.close()

    # --- what it is ---

    @property
    def connection(self) -> "Pool":
        """Its own. There is one once memory was reserved."""
        if self._connection is None:
            raise errors.EmaError("nothing was reserved yet")
        return self._connection

    @property
    def exposed_wait(self) -> float:
        """Seconds that the CPU has waited for slots."""
        return self._connection.exposed_wait if self._connection is not None else 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing is stored."""
        return not any(layer.rows for layer in self._layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of local memory that slots take just now."""
        return self._slots.size if self._slots is not None else 0

    @property
    def borrowed(self) -> int:
        """Bytes, in whole chunks."""
        return sum(r.size for r in self._regions.values())

    @property
    def fetch_seconds(self) -> float:
        """How long one fetch of everything takes at the rate of where it lies now; infinite if that cannot be said."""
        parts = [(size_of(self._layers[i].rows), region.rate) for i, region in self._regions.items()]
        return sum(size / rate if rate else float("inf") for size, rate in parts if size)

    def _fill_slots(self) -> Slots:
        self.rest()
        self.check()
        self._slots = Slots(
            self.connection, [layer.rows for layer in self._layers], self._regions, self._order, self.check
        )
        return self._slots

    @contextmanager
    def _moving(self) -> Iterator[Passage]:
        self.check()
        if self._slots is not None:
            self.rest()  # a connection has two runs under way at most, and the slots' may be waiting for us
        if self._passage is None:
            most = max(region.size for region in self._regions.values())
            self._passage = Passage(self.connection, most, self._order)
        try:
            yield self._passage
        except BaseException:
            self.moved()
            raise
