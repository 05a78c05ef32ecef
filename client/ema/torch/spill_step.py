"""One step as it goes: what is saved, what of it is used, and what it tells for the next."""

import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ema.torch.spill_plan import Learnt
from ema.torch.spill_saved import Item

if TYPE_CHECKING:
    from types import FrameType

_ENGINE: Final = torch.autograd.graph._engine_run_backward.__code__  # noqa: SLF001
"""What runs backward on this thread; on the engine's own threads nothing of Python does."""
_OUTSIDE: Final = -1
"""What torch calls the backward under way while there is none."""


def in_backward() -> bool:
    """Whether this thread runs a backward just now (as reentrant checkpoints ask, too)."""
    return torch._C._current_graph_task_id() != _OUTSIDE  # noqa: SLF001 - there is no public name for it


def called_by_engine(hook: "FrameType") -> bool:
    """Whether an unpack hook (its frame) was called by a node of torch's own: those keep nothing when they are done.

    A function of the user's may keep what it saved, or return it as a gradient. It would be between engine and hook.
    """
    caller = hook.f_back
    return caller is None or caller.f_code is _ENGINE


class Step:
    """Storages are told apart by address and version, and stay known until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        self.items: list[weakref.ref[Item]] = []
        self.sizes: list[int] = []
        self.order: list[int] = []
        self._used: set[int] = set()
        self._storages: list[StorageWeakRef] = []
        self._pending: dict[int, int] = {}
        """Items that are used and still in memory, and where in the order their use began."""
        self._until: dict[int, int] = {}
        self.turned = False
        """Backward has begun."""
        self._watching = True
        self.failed = False
        """An exception went through it: it teaches nothing."""
        self._marks = [_mark(device)]
        self._lasting: frozenset[int] | None = None

    def item(self, tensor: torch.Tensor) -> tuple[Item | None, bool]:
        """The item that a saved tensor belongs to, and whether it is new. None: all that was saved of it is gone."""
        storage = tensor.untyped_storage()
        # A weak reference keeps the address from being used again, so it names one storage for the whole step.
        key = storage._cdata, tensor._version  # noqa: SLF001
        known = self._known.get(key)
        if known is not None:
            return self.items[known[1]](), False
        kind = tensor.dtype
        item = Item(len(self.items), storage.nbytes(), numbers=kind.is_floating_point or kind.is_complex)
        self._known[key] = StorageWeakRef(storage), item.index
        self._storages.append(self._known[key][0])
        self.items.append(weakref.ref(item))
        self.sizes.append(item.size)
        return item, True

    def used(self, item: Item) -> None:
        """Backward uses an item."""
        if item.index not in self._used:
            if self._watching:
                self._look()
                self._pending[item.index] = len(self.order)
            self._used.add(item.index)
            self.order.append(item.index)

    def back(self, item: Item) -> None:
        """Its bytes have come back to local memory: how long those are used counts."""
        if item.data is not None:
            self._storages[item.index] = StorageWeakRef(item.data.untyped_storage())

    def _look(self) -> None:
        """Which items are no longer in memory at this place of the order."""
        for index in [i for i in self._pending if self._storages[i].expired()]:
            del self._pending[index]
            self._until[index] = len(self.order)

    def turn(self, device: torch.device, *, known: bool) -> None:
        """Backward begins. It is watched, how long items are used, unless the step is one that is known."""
        self.turned, self._watching = True, not known
        self._marks.append(_mark(device))

    def end(self, device: torch.device) -> None:
        """It is over: what is in memory now outlives it."""
        if self.turned and self._lasting is None:
            self._marks.append(_mark(device))
            self._look()
            self._lasting = frozenset(n for ref, n in self._known.values() if not ref.expired())

    @property
    def open(self) -> bool:
        """Whether anything that it saved may still be used."""
        return any(ref() is not None for ref in self.items)

    def away(self) -> list[Item]:
        """Items that are with a neighbour, not back, and may still be used."""
        alive = (ref() for ref in self.items)
        return [i for i in alive if i is not None and i.spilled and i.data is None and i.aside is None]

    def learnt(self) -> Learnt | None:
        """What it tells, without its times; None if it was no whole step."""
        if self.failed or self._lasting is None or not self.order:
            return None
        return Learnt(tuple(self.sizes), tuple(self.order), self._lasting, self._until)

    def timed(self, learnt: Learnt) -> Learnt:
        """The same with its times. Waits for the GPU: not for the path of a step."""
        begin, turn, end = self._marks
        return replace(learnt, forward=_seconds(begin, turn), backward=_seconds(turn, end))


def _mark(device: torch.device) -> "torch.cuda.Event | float":
    """A moment: of the GPU's stream, or of this thread where it computes."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    """Between two moments; waits for the later one."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
