"""What stands in the way of doing to a streamed model what would break it: moves, casts, copies, pickles."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import nn

from ema.torch.handles import UNDO, Handle, Streamed

_GUARDED: Final = ("_apply", "__deepcopy__", "__reduce_ex__")


def guard(
    model: nn.Module, layers: Iterable[nn.Module], kinds: Callable[[], set[tuple[torch.dtype, torch.device]]]
) -> None:
    """Guard the model, the layers, what is inside them, and what is between. `kinds`: of the streamed weights."""
    inside = {id(m) for layer in layers for m in layer.modules()}
    for module in model.modules():
        if module is model or any(id(m) in inside for m in module.modules()):
            module.__dict__["_apply"] = partial(_apply, module, kinds)
            module.__dict__["__deepcopy__"] = module.__dict__["__reduce_ex__"] = _refuse_copy


def unguard(model: nn.Module) -> None:
    """Undo `guard`."""
    for module in model.modules():
        for name in _GUARDED:
            found = module.__dict__.get(name)
            if found is _refuse_copy or (isinstance(found, partial) and found.func is _apply):
                del module.__dict__[name]


def _refuse_copy(_given: object = None) -> NoReturn:
    raise Streamed(f"a streamed model cannot be copied or pickled; save its state_dict(), or {UNDO}")


def _apply(
    module: nn.Module,
    kinds: Callable[[], set[tuple[torch.dtype, torch.device]]],
    fn: Callable[..., Any],
    *more: Any,  # noqa: ANN401
    **named: Any,  # noqa: ANN401
) -> nn.Module:
    """`nn.Module._apply` for what is not streamed, if it would leave dtype and device of what is."""
    for dtype, device in kinds():
        with torch.no_grad():
            found = fn(torch.empty(0, dtype=dtype, device=device))
        if (found.dtype, found.device) != (dtype, device):
            raise Streamed(f"streamed weights stay {dtype} on {device}, not {found.dtype} on {found.device}; {UNDO}")
    weights = module._parameters  # noqa: SLF001 - what torch itself looks at here
    hidden = {name: w for name, w in weights.items() if isinstance(w, Handle)}
    weights.update(dict.fromkeys(hidden))
    try:
        type(module)._apply(module, fn, *more, **named)  # noqa: SLF001
    finally:
        weights.update(hidden)
    return module
