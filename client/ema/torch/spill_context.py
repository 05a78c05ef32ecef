"""What stands around forward and backward: steps are watched, learnt and followed, and are never wrong."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import torch

from ema import errors
from ema.torch.memory import device_of
from ema.torch.spill_choice import Choice, Wishes, choose
from ema.torch.spill_plan import Learnt
from ema.torch.spill_report import SpillReport
from ema.torch.spill_saved import Item, Saved, bytes_of, plain
from ema.torch.spill_step import Step, called_by_engine, in_backward

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.torch.spill_rings import Rings


_NEEDED: Final = 2
"""Steps in a row that go the same way before it is learnt. Twice as many each time that what was learnt served few."""
_MOST_NEEDED: Final = 64
_FEW: Final = 4


class Spill:
    """Made by `spill_activations`. One thread at a time; not for one that runs inside another."""

    def __init__(self, pool: "Pool", wishes: Wishes, min_bytes: int, *, aside: bool) -> None:
        self._pool, self._wishes, self._min_bytes, self._aside = pool, wishes, min_bytes, aside
        self._device = device_of(pool)
        self._lock = threading.RLock()
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._connection: Pool | None = None
        self._rings: Rings | None = None
        self._choice: Choice | None = None
        """What is spilled of steps that go as learnt, which may be nothing; None while that is not settled."""
        self._learnt: Learnt | None = None
        """How steps go; None until some in a row went the same way."""
        self._last: Learnt | None = None
        """How the last step went that was not as learnt."""
        self._repeated = self._served = 0
        """Steps in a row that went as that one; steps that went as learnt."""
        self._needed = _NEEDED
        self._step: Step | None = None
        self._following = False
        """The step under way has gone as learnt so far."""
        self._lost: errors.EmaError | None = None
        """What is away is lost, and why."""
        self._parked: list[tuple[Pool, Rings]] = []
        """Connections with slots that somebody still used when they were left: their memory must stay mapped."""
        self._told = False
        """The step under way has raised what it lost."""
        self._untold: errors.EmaError | None = None
        """A GPU has used what is not true, and the user has not been told."""
        self._closed = False
        self._steps = self._times_learnt = self._differing = 0
        self._waited = 0.0

    # --- for the user ---

    def __enter__(self) -> Self:
        """Begin a step.

        Raises PoolFull, LimitReached, OutOfMemory (with a given fraction), EmaError (closed); and AgentLost or DataLost
        if a GPU has used what is not true: the gradients of the step before are NaN then.
        """
        with self._lock:
            if self._closed:
                raise errors.EmaError("this spill is closed")
            if self._hooks:
                raise errors.InUse("this spill stands around a step already; make one of its own for another")
            self._begin()
            self._tell()
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            hooks.__enter__()
            self._hooks.append(hooks)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it. Raises AgentLost or DataLost if a GPU has used what is not true: gradients are NaN then."""
        with self._lock:
            self._hooks.pop().__exit__(None, None, None)
            if (step := self._step) is not None:
                step.failed |= kind is not None
                step.end(self._device)
                if step.turned and not step.open:
                    self._finish()
            if kind is None:
                self._tell()

    def _tell(self) -> None:
        if (error := self._untold) is not None:
            self._untold = None
            raise fresh(error)

    def close(self) -> None:
        """Give everything back. What a step that is not over has spilled is brought back first. Twice is harmless."""
        with self._lock:
            if self._closed:
                return
            if self._hooks:
                raise errors.InUse("close this spill after the step that it stands around")
            self._closed = True
            self._finish()
            self._leave()
            for connection, rings in self._parked:
                if not rings.in_use:
                    connection.close()

    @property
    def report(self) -> SpillReport:
        """What happened so far."""
        rings = self._rings
        spilled = 0 if rings is None else rings.bytes
        learnt, waited = self._learnt, self._waited
        if self._connection is not None and rings is not None:
            waited += self._connection.exposed_wait + rings.lane.waited
        saved = 0 if learnt is None else sum(n for i, n in enumerate(learnt.sizes) if i not in learnt.lasting)
        return SpillReport(
            steps=self._steps,
            learnt=self._times_learnt,
            differing=self._differing,
            spilled_bytes=spilled,
            kept_bytes=saved - spilled,
            in_place_bytes=0 if rings is None else rings.in_place_bytes,
            slot_bytes=0 if rings is None else rings.slot_bytes,
            exposed_wait=waited,
            limited="" if self._choice is None else self._choice.limited,
        )

    # --- what autograd calls ---

    def _pack(self, tensor: torch.Tensor) -> Saved:
        if in_backward():  # what a reentrant checkpoint or a second derivative saves
            with self._lock:
                return Saved(tensor.clone() if self._in_slot(tensor) else tensor)
        with self._lock:
            if self._step is None or (self._step.turned and not self._step.open):
                self._begin()
            step = self._step
            assert step is not None  # noqa: S101 - just begun
            if not plain(tensor, self._device) or tensor.untyped_storage().nbytes() < self._min_bytes:
                return Saved(tensor, step)
            if step.turned:  # a second forward while the first may still be used
                self._following = False
                return Saved(tensor, step)
            item, new = step.item(tensor)
            if item is not None and new:
                if self._wanted(item):
                    self._put(item, tensor)
                if self._aside and not item.spilled and not self._stays(item):
                    item.aside, item.spilled = bytes_of(tensor).to("cpu", copy=True), True
            return Saved(tensor, step, item)

    def _unpack(self, saved: Saved) -> torch.Tensor:
        stay = called_by_engine(sys._getframe())  # noqa: SLF001 - nothing else tells who asks
        with self._lock:
            step, item = saved.step, saved.item
            if step is not None and step is self._step and not step.turned:
                self._turn(step)
            if self._rings is not None and self._lost is None:
                with self._handing_over():
                    self._rings.release()
            saved.check()
            if step is not None and item is not None:
                if item.aside is not None and item.data is None:
                    item.data = item.aside.to(self._device, copy=True)
                    step.back(item)
                step.used(item)
                if item.spilled and item.data is None:
                    self._bring(item, stay=stay)
                elif item.data is not None and not stay and self._in_slot(item.data):
                    item.data = item.data.clone()
            return saved.tensor()

    # --- a step ---

    def _begin(self) -> None:
        """A new step: the last one is finished, and what it taught is used."""
        self._finish()
        self._told = False
        if self._rings is not None and (self._rings.lost is not None or not self._rings.fresh):
            self._leave()
        if self._choice is None and self._learnt is not None and self._pool.alive:
            self._make(self._learnt)
        self._following = self._learnt is not None
        self._step = Step(self._device)

    def _wanted(self, item: Item) -> bool:
        """Whether this item, which was just saved, is to be spilled."""
        learnt = self._learnt
        if not self._following or learnt is None:
            return False
        self._following = item.index < len(learnt.sizes) and learnt.sizes[item.index] == item.size
        choice = self._choice
        return self._following and choice is not None and item.index in choice.items and self._lost is None

    def _stays(self, item: Item) -> bool:
        """Whether this item is to stay in local memory, since it was learnt that it does."""
        return self._following and self._choice is not None and item.index not in self._choice.items

    def _put(self, item: Item, tensor: torch.Tensor) -> None:
        if self._rings is not None:
            with self._handing_over():
                self._rings.put(item.index, bytes_of(tensor))
                item.spilled = True

    def _turn(self, step: Step) -> None:
        learnt = self._learnt
        known = self._following and learnt is not None and len(step.sizes) == len(learnt.sizes)
        step.turn(self._device, known=known)
        if self._rings is not None and self._lost is None:
            with self._handing_over():
                self._rings.turn()

    def _in_slot(self, tensor: torch.Tensor) -> bool:
        return self._rings is not None and self._rings.owns(tensor)

    def _bring(self, wanted: Item, *, stay: bool) -> None:
        """Take what comes until this item has come. What comes before it and is still wanted waits in local memory."""
        if wanted.lost is None and self._lost is None:
            with self._handing_over():
                while wanted.data is None and self._take(wanted if stay else None):
                    pass
        if wanted.data is None:
            lost = wanted.lost or self._lost or errors.EmaError(f"item {wanted.index} of this step did not come back")
            self._told = True
            raise fresh(lost)

    def _take(self, stays: Item | None = None) -> bool:
        """Take one item; False if none is coming. `stays` may stay in its slot."""
        rings, step = self._rings, self._step
        if rings is None or step is None or (index := rings.coming) is None:
            return False
        item = step.items[index]() if index < len(step.items) else None
        item = item if item is not None and item.spilled and item.aside is None else None
        rings.take(item, stay=item is not None and item is stays and item.numbers)
        return True

    def _finish(self) -> None:
        """The step under way is over. What of it may still be used is brought back; programs go on to their end."""
        step, rings = self._step, self._rings
        if step is None:
            return
        if rings is not None and self._lost is None:
            with self._handing_over():
                rings.finish_stores()
                if step.away():
                    rings.turn()
                while self._take():
                    pass
                rings.rest()
        self._step = None
        if self._lost is not None:
            for item in step.away():
                item.lost = self._lost
            self._leave()
        step.end(self._device)
        self._learn(step)

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """What is lost meanwhile is told of where it is used: whatever is still here stays right.

        After an interruption nobody knows which slot was handed over: all that is away counts as lost then, too.
        """
        try:
            yield
        except errors.EmaError as error:
            self._lost = fresh(error)
        except BaseException:
            self._lost = errors.EmaError("a step was interrupted while it handed slots over")
            raise
        if self._rings is not None and (lost := self._rings.lost) is not None:
            self._lost = fresh(lost)

    # --- what is learnt ---

    def _learn(self, step: Step) -> None:
        seen = step.learnt()
        self._steps += step.turned
        if seen is not None and seen.alike(self._learnt):
            self._served += 1
            self._last = None
            return
        self._differing += self._learnt is not None and bool(step.sizes)
        if seen is None or self._last is None or not seen.alike(self._last):
            self._last, self._repeated = seen, 1
            return
        self._last, self._repeated = seen.joined(self._last), self._repeated + 1
        if self._repeated < self._needed:
            return
        if self._learnt is not None:
            soon = self._served < _FEW * self._needed
            self._needed = min(_MOST_NEEDED, 2 * self._needed) if soon else _NEEDED
        self._leave()
        self._learnt, self._last = step.timed(self._last), None
        self._served = 0
        self._times_learnt += 1

    def _make(self, learnt: Learnt) -> None:
        """Choose what to spill, and make ready for it. With a given fraction it raises what keeps it from being had."""
        self._choice = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the steps that were watched have left there what the slots need
        with ExitStack() as undo:
            try:
                connection = undo.enter_context(self._pool.another("activations"))
                choice = choose(learnt, self._wishes, connection)
            except errors.AgentLost:
                return  # it has just gone: tried again at the next step
            self._choice = choice
            if choice.rings is not None:
                undo.pop_all()
                self._connection, self._rings = connection, choice.rings

    def _leave(self) -> None:
        """Give the region and the slots back; nothing that was queued uses them any more when this returns."""
        if self._connection is not None:
            self._waited += self._connection.exposed_wait
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            if (rings := self._rings) is not None:
                self._waited += rings.lane.waited
                if rings.lost is not None and rings.spoilt and not self._told:
                    self._untold = fresh(rings.lost)
                rings.close()
                if rings.in_use:
                    self._parked.append((self._connection, rings))
                    self._wishes = replace(self._wishes, in_place=False)
            if not self._parked or self._parked[-1][0] is not self._connection:
                self._connection.close()
        self._connection = self._rings = self._lost = self._choice = None


def fresh(error: errors.EmaError) -> errors.EmaError:
    """The same error without the frames that it went through: those hold slots and saved tensors in memory."""
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    return again
