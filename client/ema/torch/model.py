"""A model whose layers are cut: where each layer is, how it gets there and back, and what its weights read as."""

import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from ema import errors
from ema.torch.clock import clock, typical, undisturbed
from ema.torch.cut import Cut
from ema.torch.handles import UNDO, Handle, Streamed
from ema.torch.layers import Layer, Weight
from ema.torch.layout import lay
from ema.torch.memory import device_of
from ema.torch.order import order as order_of
from ema.torch.running import Place, Running
from ema.torch.tuner import Tuner

if TYPE_CHECKING:
    from types import FrameType

    from ema.pool import Pool


WARM: Final = 2
TIMED: Final = 6
"""Steps that are run, and then timed, before it is decided how to cut."""


class Model:
    """A streamed model, beside the `nn.Module` itself, which it does not keep alive."""

    def __init__(
        self, pool: "Pool", layers: Sequence[Layer], *, resident: float | None, slots: int, timeout: float
    ) -> None:
        """`resident`: the fraction that is local, or None: what is found best."""
        self.layers = list(layers)
        self.lock = threading.RLock()
        """Held while a layer runs: two threads' layers take turns."""
        self.inside: Running | None = None
        """The layer that runs."""
        self._pool, self._slots, self._timeout = pool, slots, timeout
        self._device = device_of(pool)
        self._streams = order_of(self._device)
        self.in_step = False
        """Whether the whole model's forward runs."""
        self.seen: list[int] | None = []
        """Layers in the order in which they ran in this step; None once that is known."""
        self.steps = 0
        self.limited = ""
        """Why less is remote than could be; empty if nothing stands against it."""
        self._resident, self._order = resident, list(range(len(layers)))
        self._tuner = None if resident is not None else Tuner(sum(layer.size for layer in layers))
        self._waited = 0.0
        self._waited_before = (0.0, 0)
        """Exposed waiting and steps when it was last decided how to cut."""
        self._clock = clock(self._device)
        self._cuts: list[Cut] = []
        self._handles = [self._make_handles(i) for i in range(len(layers))]
        self._running = [Running(self, i) for i in range(len(layers))]

    # --- cutting ---

    def begin(self) -> None:
        """Cut as wished. Raises PoolFull, LimitReached, OutOfMemory, AgentLost."""
        if self._resident is not None:
            self.cut(self._resident)

    def cut(self, resident: float) -> None:
        """Cut all layers so that this fraction of each is local, however they are cut now.

        Raises PoolFull, LimitReached, OutOfMemory: then all is as before.
        """
        sizes = [layer.size for layer in self.layers]
        layout = lay(sizes, resident, order=self._order, slots=self._slots, grain=self._pool.granularity)
        with self.lock, torch.inference_mode(mode=False), torch.no_grad():
            if not layout.order:
                self.restore()
                return
            before = list(self._cuts)
            new = Cut(self._cuts, self._pool, layout, self._streams, self._timeout)
            try:
                for old in before:
                    self._leave(old, new)
                for i in layout.slices:
                    if self._running[i].place is None:
                        self._move(i, new, None)
            except errors.EmaError:
                for old in before[:1]:  # there is room in it for what was taken from it
                    old.feed.stop()
                    self._leave(new, old)
                    self._close(new)
                if not before:
                    self.restore()
                raise
            new.flush()
            new.feed.begin()
            for old in before:
                self._close(old)

    def _leave(self, old: Cut, new: Cut) -> None:
        """Bring layers from one cut to another, or home if that one keeps them whole."""
        for i, memory in old.pull(self._in(old)):
            if i in new.layout.slices:
                self._move(i, new, memory)
            else:
                self._bring_home(i, memory)
            old.drop(i)

    def _in(self, cut: Cut) -> list[int]:
        """Layers that are cut this way."""
        return [r.number for r in self._running if r.place is not None and r.place.cut is cut]

    def _bring_home(self, number: int, memory: torch.Tensor) -> None:
        for weight in self.layers[number].weights:
            weight.come_back(memory)
        self._home(number)

    def _close(self, cut: Cut) -> None:
        self._waited += cut.exposed_wait
        cut.close()
        self._cuts.remove(cut)

    def _move(self, number: int, cut: Cut, source: torch.Tensor | None) -> None:
        """A layer's bytes, from `source` or its parameters, to a cut."""
        layer = self.layers[number]
        if source is None:
            self._check_own(layer)

        def fill(memory: torch.Tensor) -> None:
            for weight in layer.weights:
                now = weight.parameter.data if source is None else weight.within(source)
                weight.within(memory).copy_(now)

        memory = cut.push(number, fill)
        swaps = [
            (module._parameters, name, weight.within(memory), handle)  # noqa: SLF001 - where torch keeps them
            for weight, handle in zip(layer.weights, self._handles[number], strict=True)
            for module, name in weight.sites
        ]
        running = self._running[number]
        running.place = Place(cut, tuple(swaps))
        for weights, name, _, handle in swaps:
            weights[name] = handle
        running.put(layer.module)
        if source is None:
            for weight in layer.weights:
                weight.leave()
            self._streams.trim()

    def _check_own(self, layer: Layer) -> None:
        for weight in layer.weights:
            for module, name in weight.sites:
                if module._parameters.get(name) is not weight.parameter:  # noqa: SLF001
                    raise Streamed(f"{name} of {layer.name} was replaced since the model was given to `stream`")

    def restore(self) -> None:
        """Bring every layer back to memory of torch's own. What was done is kept if it fails; go on by calling again.

        Raises OutOfMemory, AgentLost, DataLost.
        """
        with self.lock, torch.inference_mode(mode=False), torch.no_grad():
            self.check_free(None)
            for cut in list(self._cuts):
                for i, memory in cut.pull(self._in(cut)):
                    self._bring_home(i, memory)
                    cut.drop(i)
                self._close(cut)
            for i in range(len(self.layers)):
                self._home(i)

    def _home(self, number: int) -> None:
        """The parameters hold the bytes again: use them."""
        layer, running = self.layers[number], self._running[number]
        running.place = None
        for weight, handle in zip(layer.weights, self._handles[number], strict=True):
            weight.set_requires_grad(handle.requires_grad)
            for module, name in weight.sites:
                if module._parameters.get(name) is handle:  # noqa: SLF001
                    module._parameters[name] = weight.parameter  # noqa: SLF001
        running.undo(layer.module)

    # --- reading ---

    def _make_handles(self, number: int) -> list[Handle]:
        layer, here = self.layers[number], weakref.ref(self)
        made = []
        for at, weight in enumerate(layer.weights):
            module, name = weight.sites[0]
            inner = next((n for n, m in layer.module.named_modules() if m is module), "")
            full = ".".join(part for part in (layer.name, inner, name) if part)
            made.append(_handle(full, weight, here, number, at))
        return made

    def read(self, number: int, at: int) -> torch.Tensor:
        """A copy of a weight."""
        weight = self.layers[number].weights[at]
        with self.lock, torch.no_grad():
            running = self._running[number]
            place = running.place
            if place is None:
                return weight.parameter.detach().clone()
            if self.inside is not running:
                self.check_free(None)
                place.cut.feed.take(number)
                place.cut.certain()
            return weight.within(place.cut.memory(number)).clone()

    # --- the step ---

    def before_step(self) -> None:
        """The whole model is about to run: what is to be changed is changed now.

        Raises Streamed, AgentLost, DataLost.
        """
        if self._streams.capturing():
            raise Streamed(f"a step of a streamed model cannot be captured into a graph; {UNDO}")
        if self._tuner is not None and not self._tuner.settled and len(self._clock.times) >= WARM + TIMED:
            self._tune(self._tuner, undisturbed([*self._clock.times][WARM:]))
            self._clock.forget()
            self._waited_before = self.exposed_wait, self.steps
        if self.seen is not None:
            self.seen = []
        self._clock.start()

    def after_step(self, output: object) -> None:
        """It has run."""
        for cut in self._cuts:
            if cut.poison is not None:
                cut.poison(output)
        self._clock.stop()
        self.steps += 1
        if self.seen:
            self._learn([i for at, i in enumerate(self.seen) if not at or self.seen[at - 1] != i])
            self.seen = None

    def _learn(self, ran: list[int]) -> None:
        """Layers run in this order: fetch in this order."""
        order = ran + [i for i in self._order if i not in set(ran)]
        if order == self._order:
            return
        with self.lock:
            self._order = order
            for cut in filter(self._in, self._cuts):
                cut.reorder([i for i in order if i in cut.layout.slices])

    def _tune(self, tuner: Tuner, step: float) -> None:
        """Cut anew if more or less hides behind steps than is remote now."""
        remote = self.remote
        waited, steps = self._waited_before
        exposed = None if self._device.type == "cuda" else (self.exposed_wait - waited) / max(1, self.steps - steps)
        target = tuner.tried(remote, step, exposed) if tuner.local else tuner.begin(step, self._pool.rate)
        while True:
            try:
                if target != remote:
                    self._cut_to(target)
            except (errors.PoolFull, errors.LimitReached, errors.OutOfMemory) as error:
                self.limited = str(error)
                if tuner.settled:
                    return
                target = tuner.not_to_be_had(target)
            else:
                return

    def check_free(self, wanted: Running | None) -> None:
        """Raise Streamed if a layer runs. One that was interrupted at its very end is ended now."""
        inside = self.inside
        if inside is None:
            return
        where = self.layers[inside.number].name
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        own = wanted is not None and wanted.number == inside.number  # then one of the calls is the one that asks
        while frame is not None:
            if inside.is_called_in(frame):
                if own:
                    own, frame = False, frame.f_back
                    continue
                what = "weights are read" if wanted is None else f"{self.layers[wanted.number].name} is run"
                raise Streamed(f"{what} inside {where}, which has a slot just then; name the layers by `layers=`")
            frame = frame.f_back
        inside.leave()

    def _cut_to(self, remote: int) -> None:
        sizes = [layer.size for layer in self.layers]
        resident = 1.0 - remote / sum(sizes)
        layout = lay(sizes, resident, order=self._order, slots=self._slots, grain=self._pool.granularity)
        if 0 < layout.remote <= layout.window:
            self.limited = f"{layout.remote} bytes hide behind a step; the slots alone would take {layout.window}"
            resident = 1.0
        self.cut(resident)

    # --- the end ---

    def end(self) -> None:
        """Bring every layer home for good. Raises OutOfMemory, AgentLost, DataLost."""
        self._tuner = None
        self.restore()
        # Nothing of this refers to the modules any more: their memory is free as soon as they are forgotten.
        for kept in (self.layers, self._running, self._handles):
            kept.clear()

    @property
    def cuts(self) -> list[Cut]:
        """What has to be closed in the end. Always the same list."""
        return self._cuts

    @property
    def modules(self) -> list[nn.Module]:
        """Of the layers."""
        return [layer.module for layer in self.layers]

    @property
    def remote(self) -> int:
        """Bytes that are in no local memory but a slot's."""
        places = ((r.number, r.place) for r in self._running)
        return sum(p.cut.layout.slices[i].size for i, p in places if p is not None)

    @property
    def window(self) -> int:
        """Bytes of all slots."""
        return sum(c.layout.window for c in self._cuts)

    @property
    def exposed_wait(self) -> float:
        """Seconds that the CPU has waited for slots."""
        return self._waited + sum(c.exposed_wait for c in self._cuts)

    @property
    def step_seconds(self) -> float:
        """Of a step as most are."""
        return typical(self._clock.times)

    def kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        """Of the weights that are streamed, or may be."""
        return {(w.dtype, self._device) for layer in self.layers for w in layer.weights}


def _handle(name: str, weight: Weight, here: "weakref.ref[Model]", number: int, at: int) -> Handle:
    parameter = weakref.ref(weight.parameter)

    def read() -> torch.Tensor:
        model, own = here(), parameter()
        if own is not None and own.numel():  # it is not streamed any more
            return own.detach().clone()
        if model is None:
            raise Streamed(f"{name} belongs to a streamed model that is gone")
        return model.read(number, at)

    return Handle(
        name,
        read,
        weight.shape,
        weight.stride,
        dtype=weight.dtype,
        device=weight.parameter.device,
        requires_grad=weight.parameter.requires_grad,
    )
