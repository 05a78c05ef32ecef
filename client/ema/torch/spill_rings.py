"""The way out and back: a region, and two rings of slots that one store and one fetch program go through.

At rest every slot of the way out is empty and every slot of the way back is full, so neither program moves until the
step hands slots over. The turn, where forward ends and backward begins, is where the way back opens: only then is
everything stored.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ema import errors
from ema.torch.handover import handover
from ema.torch.memory import bytes_at, device_of
from ema.torch.spill_guard import Guard, Mask
from ema.torch.spill_lane import Lane
from ema.torch.spill_plan import Piece, pieces, places, rounded
from ema_driver.protocol import StreamOrdered

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.region import Region
    from ema.torch.spill_saved import Item
    from ema.window import Slot, Window
    from ema_core.wire import CopyStep


@dataclass(frozen=True, slots=True)
class Held:
    """A slot whose bytes are used where they are."""

    piece: int
    slot: int
    """Index in the ring."""
    item: "weakref.ref[Item]"
    storage: StorageWeakRef


class Rings:
    """Serves one step after another. Belongs to one thread at a time.

    On simulated GPUs calls wait, and raise AgentLost or DataLost. On real ones they queue work and wait for nothing but
    the run before the last to end.
    """

    def __init__(
        self,
        pool: "Pool",
        sizes: Sequence[int],
        *,
        out: Sequence[int],
        back: Sequence[int],
        passing: frozenset[int],
        slots: int,
        slot_bytes: tuple[int, int],
        timeout: float,
    ) -> None:
        """For items of `sizes` bytes, stored in the order `out` and fetched in the order `back`.

        Each way has `slots` slots, of so many bytes out and back. Items of `passing` may stay in their slot while they
        are used, if they are in one piece.

        Raises PoolFull, LimitReached, OutOfMemory, AgentLost; then nothing is left of it.
        """
        self._pool = pool
        self._hand = handover(pool)
        self._device = device_of(pool)
        self.lane = Lane(self._device)
        self.session = pool.session
        at, size = places(sizes, out)
        self._out = pieces(sizes, out, at, slots, slot_bytes[0])
        self._back = pieces(sizes, back, at, slots, slot_bytes[1])
        self._passing = frozenset(i for i in passing if sizes[i] <= slot_bytes[1])
        self._held: dict[int, Held] = {}
        """By slot of the way back."""
        self._last = {p.item: n for n, p in enumerate(self._out, 1)}
        """Item → how many pieces are stored once it is."""
        with ExitStack() as undo:
            self._region: Region = pool.region(size, timeout=timeout)
            undo.callback(self._region.close)
            self._windows: list[Window] = []
            for size in slot_bytes:
                self._windows.append(pool.window(slots, size))
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
        self.guard = Guard(pool, out_window, back_window) if isinstance(pool.driver, StreamOrdered) else None
        self._mask = None if self.guard is None else Mask(self.guard.words())

    @property
    def bytes(self) -> int:
        """Bytes that go out, and come back, in one step."""
        return sum(p.size for p in self._out)

    @property
    def in_place_bytes(self) -> int:
        """Bytes of these that may be used in their slots."""
        return sum(p.size for p in self._back if p.item in self._passing)

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
        with self.lane.entered():
            for n in range(self._stored, self._last[item]):
                piece, (slot, there) = self._out[n], self._out_slots[n]
                self._await_empty(slot)
                there[: piece.size].copy_(data[piece.start : piece.start + piece.size])
                self._hand.filled(slot)
                self._stored = n + 1

    def turn(self) -> None:
        """All that is to be stored was put: fetch it back as soon as it is stored. Raises AgentLost, DataLost."""
        if self._fetching or not self._storing:
            return
        self.finish_stores()
        self._fetch.start()
        self._fetching = True
        with self.lane.entered():
            for slot, _ in self._back_slots[: len(self._windows[1])]:
                self._hand.emptied(slot)

    def finish_stores(self) -> None:
        """Hand over what a step that went another way did not, and wait until the slots are empty again."""
        if not self._storing or self._fetching:
            return
        with self.lane.entered():
            while self._stored < len(self._out):
                slot, _ = self._out_slots[self._stored]
                self._await_empty(slot)
                self._hand.filled(slot)
                self._stored += 1
            for slot, _ in self._out_slots[: len(self._windows[0])]:
                self._await_empty(slot)

    @property
    def coming(self) -> int | None:
        """The item that is fetched next; None when all were taken, or while nothing is fetched."""
        return self._back[self._fetched].item if self._fetching and self._fetched < len(self._back) else None

    def take(self, item: "Item | None", *, stay: bool = False) -> None:
        """Give the item that is `coming` its bytes; None: it is not wanted any more.

        `stay`: whoever uses it is on this stream, so that it may stay in its slot. Raises AgentLost, DataLost, InUse;
        on a GPU, bytes that are not true are spoilt.
        """
        coming, local = self.coming, None
        stay = stay and coming in self._passing and self.lane.here
        if item is not None and not stay:  # memory of the stream that uses it
            local = torch.empty(rounded(item.size), dtype=torch.uint8, device=self._device)
        with self.lane.entered():
            while self.coming == coming is not None:
                n = self._fetched
                piece, (slot, there) = self._back[n], self._back_slots[n]
                if (held := self._held.get(piece.slot)) is not None:
                    self._evict(held)
                with self.lane.waiting():
                    self._hand.await_full(slot)
                if item is not None and stay:
                    self._stay(n, item)
                else:
                    if item is not None and local is not None:
                        self._copy(there, local[piece.start : piece.start + len(there)], item)
                    self._give_back(n)
                self._fetched = n + 1
        if item is not None and local is not None:
            item.data = local  # only now: what has not come whole must not be seen

    def release(self) -> None:
        """Give slots back whose items nobody uses any more."""
        if self._held and (gone := [held for held in self._held.values() if held.storage.expired()]):
            with self.lane.entered():
                for held in gone:
                    del self._held[held.slot]
                    self._give_back(held.piece)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether these are bytes of a slot."""
        return any(tensor.untyped_storage()._cdata == held.storage.cdata for held in self._held.values())  # noqa: SLF001

    @property
    def in_use(self) -> bool:
        """Whether somebody still uses bytes of a slot."""
        return any(not held.storage.expired() for held in self._held.values())

    @property
    def lost(self) -> "errors.EmaError | None":
        """Why the GPU's stream no longer waits for the agent; None while it does, and where nothing is ordered so."""
        return None if self.guard is None else self.guard.lost

    @property
    def spoilt(self) -> bool:
        """Whether bytes were used that are not true. Waits for the GPU: for when something is lost."""
        return self._mask is not None and self._mask.spoilt

    def rest(self) -> None:
        """A step is over, and all was handed over: ready for the next. Raises InUse."""
        for held in list(self._held.values()):
            self._evict(held)
        self._stored = self._fetched = 0
        self._storing = self._fetching = False

    def close(self) -> None:
        """Let go of the slots, before their memory is given back with the pool. Nothing may be queued for them."""
        if self.guard is not None:
            self.guard.close()
        self._out_slots, self._back_slots, self._mask = [], [], None

    def _stay(self, n: int, item: "Item") -> None:
        slot, there = self._back_slots[n]
        data = item.data = self._storage(slot, len(there))
        if self._mask is not None:
            self._mask.spoil(data)
        ref = StorageWeakRef(data.untyped_storage())
        self._held[self._back[n].slot] = Held(n, self._back[n].slot, weakref.ref(item), ref)

    def _storage(self, slot: "Slot", size: int) -> torch.Tensor:
        """Bytes of a slot as a storage that nobody else has, so that it tells when it is used no more."""
        if self._device.type != "cuda":
            return torch.frombuffer(slot.view[:size], dtype=torch.uint8)
        storage = torch._C._construct_storage_from_data_pointer(slot.address, self._device, size)  # noqa: SLF001
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _evict(self, held: "Held") -> None:
        """Its slot is needed: what may still be used of it goes on in local memory."""
        item = held.item()
        if item is not None and item.data is not None:
            item.data = item.data.clone()
        if not held.storage.expired():
            raise errors.InUse("a saved tensor is used for longer than was learnt: spill_activations(in_place=False)")
        del self._held[held.slot]
        self._give_back(held.piece)

    def _give_back(self, n: int) -> None:
        if n + len(self._windows[1]) < len(self._back):
            self._hand.emptied(self._back_slots[n][0])

    def _copy(self, there: torch.Tensor, target: torch.Tensor, item: "Item") -> None:
        if self._mask is None:
            target.copy_(there)
        else:
            self._mask.copy(there, target, numbers=item.numbers)

    def _await_empty(self, slot: "Slot") -> None:
        with self.lane.waiting():
            self._hand.await_empty(slot)

    def _begin(self) -> None:
        if not self._storing:
            self._store.start()
            self._storing = True

    def _steps(self, cut: Sequence[Piece], window: "Window") -> "list[CopyStep]":
        return [self._region.step(window[p.slot], p.at, p.size) for p in cut]

    def _seen(self, window: "Window", cut: Sequence[Piece]) -> "list[tuple[Slot, torch.Tensor]]":
        """Each piece's slot, and its bytes there, rounded up to 8."""
        views: Mapping[int, torch.Tensor] = {
            n: bytes_at(self._pool, slot.address, slot.size) for n, slot in enumerate(window.slots)
        }
        return [(window[p.slot], views[p.slot][: rounded(p.size)]) for p in cut]
