"""A model whose layers are cut: where each layer is, how it gets there and back, and what its weights read as."""

import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ema.torch.cut import Cut
from ema.torch.handles import Handle, Streamed
from ema.torch.layers import Layer, Weight
from ema.torch.layout import lay
from ema.torch.memory import device_of
from ema.torch.order import order as order_of
from ema.torch.running import Place, Running

if TYPE_CHECKING:
    from types import FrameType

    from ema.pool import Pool


class Model:
    """A streamed model, beside the `nn.Module` itself, which it does not keep alive."""

    def __init__(self, pool: "Pool", layers: Sequence[Layer], *, slots: int, timeout: float) -> None:
        self.layers = list(layers)
        self.lock = threading.RLock()
        """Held while a layer runs: two threads' layers take turns."""
        self.inside: Running | None = None
        """The layer that runs."""
        self._pool, self._slots, self._timeout = pool, slots, timeout
        self._device = device_of(pool)
        self._streams = order_of(self._device)
        self._cuts: list[Cut] = []
        self._handles = [self._make_handles(i) for i in range(len(layers))]
        self._running = [Running(self, i) for i in range(len(layers))]

    # --- cutting ---

    def cut(self, resident: float) -> None:
        """Cut all layers so that this fraction of each is local.

        Raises PoolFull, LimitReached, OutOfMemory, AgentLost; `restore` undoes what was done by then.
        """
        sizes = [layer.size for layer in self.layers]
        order = range(len(sizes))
        layout = lay(sizes, resident, order=order, slots=self._slots, grain=self._pool.granularity)
        if not layout.order:
            return
        with self.lock, torch.inference_mode(mode=False), torch.no_grad():
            cut = Cut(self._pool, layout, self._streams, self._timeout)
            self._cuts.append(cut)
            for i in layout.slices:
                self._move(i, cut, None)
            cut.flush()
            cut.feed.begin()

    def _move(self, number: int, cut: Cut, source: torch.Tensor | None) -> None:
        """A layer's bytes, from `source` or its parameters, to a cut."""
        layer = self.layers[number]

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

    def restore(self) -> None:
        """Bring every layer back to memory of torch's own. What was done is kept if it fails; go on by calling again.

        Raises OutOfMemory, AgentLost, DataLost.
        """
        with self.lock, torch.inference_mode(mode=False), torch.no_grad():
            self.check_free(None)
            for cut in self._cuts:
                away = [r.number for r in self._running if r.place is not None and r.place.cut is cut]
                if away:
                    for i, memory in cut.pull(away):
                        for weight in self.layers[i].weights:
                            weight.come_back(memory)
                        self._home(i)
                        cut.drop(i)
                cut.close()
            self._cuts.clear()
            for i in range(len(self.layers)):
                self._home(i)

    def _home(self, number: int) -> None:
        """The parameters hold the bytes again: use them."""
        layer, running = self.layers[number], self._running[number]
        running.place = None
        for weight, handle in zip(layer.weights, self._handles[number], strict=True):
            for module, name in weight.sites:
                if module._parameters.get(name) is handle:  # noqa: SLF001
                    module._parameters[name] = weight.parameter  # noqa: SLF001
                    weight.parameter.requires_grad_(handle.requires_grad)
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
            return weight.within(place.cut.memory(number)).clone()

    # --- the step ---

    def check_free(self, wanted: Running | None) -> None:
        """Raise Streamed if a layer runs. One that was interrupted at its very end is ended now."""
        inside = self.inside
        if inside is None:
            return
        where = self.layers[inside.number].name
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        while frame is not None:
            if frame.f_code is Running.__call__.__code__ and frame.f_locals.get("self") is inside:
                what = "weights are read" if wanted is None else f"{self.layers[wanted.number].name} is run"
                raise Streamed(f"{what} inside {where}, which has a slot just then; name the layers by `layers=`")
            frame = frame.f_back
        inside.leave()

    # --- the end ---

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
        return sum(c.exposed_wait for c in self._cuts)

    def kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        """Of the weights that are streamed."""
        away = [r.number for r in self._running if r.place is not None]
        return {(w.dtype, self._device) for i in away for w in self.layers[i].weights}


def _handle(name: str, weight: Weight, here: "weakref.ref[Model]", number: int, at: int) -> Handle:
    def read() -> torch.Tensor:
        model = here()
        if model is None:
            raise Streamed(f"{name} belongs to a streamed model that is gone")
        return model.read(number, at)

    parameter = weight.parameter
    return Handle(
        name,
        read,
        weight.shape,
        weight.stride,
        dtype=weight.dtype,
        device=parameter.device,
        requires_grad=parameter.requires_grad,
    )
