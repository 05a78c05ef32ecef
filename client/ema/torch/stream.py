"""Stream a model's weights from lent memory: a fraction of every layer, fetched while the layers before it run."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import nn

from ema import arguments, errors
from ema.torch import guards
from ema.torch.cut import Cut
from ema.torch.handles import UNDO
from ema.torch.layers import find
from ema.torch.memory import device_of
from ema.torch.model import Model
from ema.torch.running import Whole

if TYPE_CHECKING:
    from ema.pool import Pool

_KEPT: Final = "_ema_streamed"
"""Under this name a module keeps what is known of it as a streamed one."""


@dataclass(frozen=True, slots=True)
class Report:
    """What streaming a model does just now."""

    resident: float
    """Fraction of the layers' bytes that is local."""
    remote_bytes: int
    window_bytes: int
    """Bytes of local memory that the slots take."""
    saved_bytes: int
    """Bytes of local memory that are free for other things: remote less window."""
    steps: int
    step_seconds: float
    """Median of the last steps."""
    exposed_wait: float
    """Seconds that this process has waited for slots, in all. On GPUs it is the stream that waits: not counted."""
    limited: str
    """Why less is remote than "auto" would have; empty if nothing stands against it."""


def stream(
    model: nn.Module,
    pool: "Pool",
    *,
    resident: float | str = "auto",
    slots: int = 4,
    layers: Iterable[nn.Module] | None = None,
    timeout: float = 2.0,
) -> nn.Module:
    """Keep a fraction of each layer's weights local, and fetch the rest from neighbours while the layers before it run.

    The model is changed in place, and returned. `resident`: the fraction that stays (0 to 1); what is not a multiple of
    `pool.granularity` bytes is rounded up. `slots`: pieces of local memory, each as large as the largest remote part of
    a layer, that all layers share. `layers`: the modules that run one after the other, where they are not found.
    `timeout`: seconds to wait for memory.

    Raises BadInput, PoolFull, LimitReached, OutOfMemory, AgentLost, InUse (streamed already); nothing has changed then.
    """
    wanted = None if resident == "auto" else _fraction(resident)
    slots = arguments.whole("slots", slots, 1, 32)
    timeout = arguments.seconds("timeout", timeout)
    if any(_KEPT in module.__dict__ for module in model.modules()):
        raise errors.InUse(f"this model, or a part of it, is streamed already; {UNDO}")
    streamed = Model(
        pool,
        find(model, device_of(pool), None if layers is None else list(layers)),
        resident=wanted,
        slots=slots,
        timeout=timeout,
    )
    if wanted == 1.0:
        model.__dict__[_KEPT] = streamed
        return model
    whole = Whole(model, streamed)
    model.__dict__[_KEPT] = streamed
    try:
        weakref.finalize(model, _close, streamed.cuts)
        streamed.begin()
        guards.guard(model, streamed.modules, streamed.kinds)
        whole.put(model)
    except BaseException:
        unstream(model)
        raise
    return model


def unstream(model: nn.Module) -> nn.Module:
    """Bring all weights back to local memory; the model is as it was before, and returned.

    Raises OutOfMemory, AgentLost, DataLost; the model is streamed then as before, as far as it can be.
    """
    _streamed(model).end()
    guards.unguard(model)
    if isinstance(whole := model.__dict__.get("forward"), Whole):
        whole.undo(model)
    del model.__dict__[_KEPT]
    return model


def report(model: nn.Module) -> Report:
    """What streaming this model does just now."""
    it = _streamed(model)
    remote, window = it.remote, it.window
    return Report(
        resident=1.0 - remote / max(1, sum(layer.size for layer in it.layers)),
        remote_bytes=remote,
        window_bytes=window,
        saved_bytes=remote - window,
        steps=it.steps,
        step_seconds=it.step_seconds,
        exposed_wait=it.exposed_wait,
        limited=it.limited,
    )


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise errors.BadInput("resident", repr(value), '"auto", or a fraction from 0 to 1')
    return float(value)


def _streamed(model: nn.Module) -> Model:
    it = model.__dict__.get(_KEPT)
    if not isinstance(it, Model):
        raise errors.BadInput("model", f"a {type(model).__name__} that is not streamed", "what `stream` was given")
    return it


def _close(cuts: list[Cut]) -> None:
    for cut in cuts:
        cut.close()
