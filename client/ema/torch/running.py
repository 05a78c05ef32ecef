"""What stands in place of a module's `forward` while the model is streamed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ema.torch.handles import UNDO, Handle, Streamed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ema.torch.cut import Cut
    from ema.torch.model import Model


class Around:
    """A module's `forward` with something around it. Calling the module, or its `forward`, calls this."""

    def __init__(self, module: nn.Module) -> None:
        self._own: Callable[..., Any] | None = None
        self._forward: Callable[..., Any] = module.forward

    def put(self, module: nn.Module) -> None:
        """From now on it is called. Twice is harmless."""
        if (own := module.__dict__.get("forward")) is not self:
            self._own, self._forward = own, module.forward
            self.__wrapped__ = self._forward  # what `inspect.signature` looks at
            module.__dict__["forward"] = self

    def __call__(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401, D102 - as the module's own
        return self._forward(*given, **named)

    def undo(self, module: nn.Module) -> None:
        """Put the module's own back. Raises Streamed if somebody has wrapped this in turn."""
        found = module.__dict__.get("forward")
        if found is None or found is self._own:
            return
        if found is not self:
            name = type(module).__name__
            raise Streamed(f"the forward of {name} was replaced while it was streamed; take that back first")
        if self._own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._own


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's bytes are just now. One object, so that it is replaced at once."""

    cut: "Cut"
    swaps: tuple[tuple[dict[str, Any], str, torch.Tensor, Handle], ...]
    """For each name of each weight: the module's parameters, the name, the tensor to run with, the one to rest with."""


class Running(Around):
    """One layer's forward."""

    def __init__(self, model: "Model", number: int) -> None:
        super().__init__(model.layers[number].module)
        self._model, self.number = model, number
        self.place: Place | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401, D102
        model = self._model
        with model.lock:
            try:
                self._enter()
                output = self._forward(*given, **named)
            finally:
                self.leave()
            if not model.in_step and self.place is not None and self.place.cut.poison is not None:
                self.place.cut.poison(output)
        return output

    def _enter(self) -> None:
        if self._model.seen is not None:
            self._model.seen.append(self.number)
        model, place = self._model, self.place
        if place is None:
            return
        if torch.is_grad_enabled():
            name = model.layers[self.number].name
            raise Streamed(f"{name} is streamed, for inference only: run it under torch.inference_mode(), or {UNDO}")
        model.check_free(self)
        place.cut.feed.take(self.number)
        model.inside = self
        for weights, name, real, handle in place.swaps:
            if weights.get(name) is not handle:
                raise Streamed(f"{name} of {model.layers[self.number].name} was replaced while streamed; {UNDO}")
            weights[name] = real

    def is_called_in(self, frame: "FrameType") -> bool:
        """Whether this frame of a stack is a call of this forward."""
        return frame.f_code is Running.__call__.__code__ and frame.f_locals.get("self") is self

    def leave(self) -> None:
        """Its forward is over, or never came to run."""
        model, place = self._model, self.place
        if model.inside is not self or place is None:
            return
        for weights, name, real, handle in place.swaps:
            if weights.get(name) is real:
                weights[name] = handle
        place.cut.feed.done()
        model.inside = None


class Whole(Around):
    """The whole model's forward: one step."""

    def __init__(self, module: nn.Module, model: "Model") -> None:
        super().__init__(module)
        self._model = model

    def __call__(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401, D102
        model = self._model
        if model.in_step:
            return self._forward(*given, **named)
        model.before_step()
        try:
            model.in_step = True
            output = self._forward(*given, **named)
        finally:
            model.in_step = False
        model.after_step(output)
        return output
