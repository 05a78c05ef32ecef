"""The way out and back: a region, and two rings of slots that one store and one fetch program go through.

At rest every slot of the way out is empty and every slot of the way back is full, so neither program moves until the
step hands slots over. The turn, where forward ends and backward begins, is where the way back opens: only then is
everything stored.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from ema.torch.handover import handover
from ema.torch.memory import bytes_at
from ema.torch.spill_plan import Piece, pieces, places

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema.window import Slot, Window
    from ema_core.wire import CopyStep


class Rings:
    """Serves one step after another. Belongs to one thread at a time; every call queues work, none waits on a GPU."""

    def __init__(
        self,
        pool: "Pool",
        sizes: Sequence[int],
        *,
        out: Sequence[int],
        back: Sequence[int],
        slots: int,
        slot_bytes: int,
        timeout: float,
    ) -> None:
        """For items of `sizes` bytes, stored in the order `out` and fetched in the order `back`.

        Raises PoolFull, LimitReached, OutOfMemory, AgentLost; then nothing is left of it.
        """
        self._pool = pool
        self._hand = handover(pool)
        self.session = pool.session
        at, size = places(sizes, out)
        self._out = pieces(sizes, out, at, slots, slot_bytes)
        self._back = pieces(sizes, back, at, slots, slot_bytes)
        self._last = {p.item: n for n, p in enumerate(self._out, 1)}
        """Item → how many pieces are stored once it is."""
        with ExitStack() as undo:
            self._region: Region = pool.region(size, timeout=timeout)
            undo.callback(self._region.close)
            self._windows: list[Window] = []
            for _ in range(2):
                self._windows.append(pool.window(slots, slot_bytes))
                undo.callback(self._windows[-1].close)
            out_window, back_window = self._windows
            self._store = pool.program(self._steps(self._out, out_window), store=True)
            undo.callback(self._store.close)
            self._fetch = pool.program(self._steps(self._back, back_window))
            undo.pop_all()
        for slot in back_window.slots:
            slot.fill()
        self._out_slots = self._seen(out_window, self._out)
        self._back_slots = self._seen(back_window, self._back)
        self._stored = self._fetched = 0
        """Pieces handed over in the step under way."""
        self._storing = self._fetching = False

    @property
    def bytes(self) -> int:
        """Bytes that go out, and come back, in one step."""
        return sum(p.size for p in self._out)

    @property
    def slot_bytes(self) -> int:
        """Bytes of own memory that the slots take."""
        return sum(w.size for w in self._windows)

    @property
    def fresh(self) -> bool:
        """Whether the agent that these were made with still serves them."""
        return self._pool.alive and self._pool.session == self.session

    def put(self, item: int, data: torch.Tensor) -> None:
        """Store an item's bytes (uint8), in the order `out`. Raises AgentLost, DataLost: then nothing of it counts."""
        self._begin()
        for n in range(self._stored, self._last[item]):
            piece, (slot, there) = self._out[n], self._out_slots[n]
            self._hand.await_empty(slot)
            there.copy_(data[piece.start : piece.start + piece.size])
            self._hand.filled(slot)
            self._stored = n + 1

    def turn(self) -> None:
        """All that is to be stored was put: fetch it back as soon as it is stored. Raises AgentLost, DataLost."""
        if self._fetching or not self._storing:
            return
        self.finish_stores()
        self._fetch.start()
        self._fetching = True
        for slot, _ in self._back_slots[: len(self._windows[1])]:
            self._hand.emptied(slot)

    def finish_stores(self) -> None:
        """Hand over what a step that went another way did not, and wait until the slots are empty again."""
        while self._storing and self._stored < len(self._out):
            slot, _ = self._out_slots[self._stored]
            self._hand.await_empty(slot)
            self._hand.filled(slot)
            self._stored += 1
        if self._storing:
            for slot, _ in self._out_slots[: len(self._windows[0])]:
                self._hand.await_empty(slot)

    @property
    def coming(self) -> int | None:
        """The item that is fetched next; None when all were taken, or while nothing is fetched."""
        return self._back[self._fetched].item if self._fetching and self._fetched < len(self._back) else None

    def take(self, into: torch.Tensor | None) -> None:
        """Copy the item that is `coming` into `into` (uint8, all of its bytes); None: it is not wanted any more.

        Raises AgentLost, DataLost.
        """
        item = self.coming
        ring = len(self._windows[1])
        while self.coming == item is not None:
            n = self._fetched
            piece, (slot, there) = self._back[n], self._back_slots[n]
            self._hand.await_full(slot)
            if into is not None:
                into[piece.start : piece.start + piece.size].copy_(there)
            if n + ring < len(self._back):
                self._hand.emptied(slot)
            self._fetched = n + 1

    def rest(self) -> None:
        """A step is over, and all was handed over: ready for the next."""
        self._stored = self._fetched = 0
        self._storing = self._fetching = False

    def forget(self) -> None:
        """Let go of tensors over the slots, before their memory is given back with the pool."""
        self._out_slots, self._back_slots = [], []

    def close(self) -> None:
        """Give everything back; all that was queued must have run. Raises AgentLost, InUse."""
        self.forget()
        for program in (self._store, self._fetch):
            program.close()
        for window in self._windows:
            window.close()
        self._region.close()

    def _begin(self) -> None:
        if not self._storing:
            self._store.start()
            self._storing = True

    def _steps(self, cut: Sequence[Piece], window: "Window") -> "list[CopyStep]":
        return [self._region.step(window[p.slot], p.at, p.size) for p in cut]

    def _seen(self, window: "Window", cut: Sequence[Piece]) -> "list[tuple[Slot, torch.Tensor]]":
        """Each piece's slot, and its bytes there."""
        views: Mapping[int, torch.Tensor] = {
            n: bytes_at(self._pool, slot.address, slot.size) for n, slot in enumerate(window.slots)
        }
        return [(window[p.slot], views[p.slot][: p.size]) for p in cut]
