"""A key-value cache that can be parked on neighbours between two calls of a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from ema import arguments, errors
from ema.torch.memory import device_of
from ema.torch.order import order
from ema.transformers.parked import Parked

if TYPE_CHECKING:
    from ema.pool import Pool

_FULL: Final = "the config of a decoder with full attention in every layer"


class ElasticCache(transformers.Cache):
    """For `past_key_values` (or `cache`) of `model.generate` and of a model's call; equal to `DynamicCache`, each bit.

    Keys and values of each layer are plain tensors of the pool's own GPU. `park` moves them all to neighbours, `resume`
    brings them back. Not thread-safe. Use as a context manager, or `close` it.
    """

    def __init__(
        self,
        config: "transformers.PretrainedConfig",
        pool: "Pool",
        *,
        local: int | None = None,
    ) -> None:
        """`config` is the model's; at most `local` bytes of keys and values are held (None: what the GPU has).

        Raises BadInput: what is no config; sliding windows, linear attention, encoders.
        """
        if not isinstance(config, transformers.PretrainedConfig):
            raise errors.BadInput("config", repr(config)[:80], "model.config")
        if getattr(config, "is_encoder_decoder", False):
            raise errors.BadInput("config", f"of {config.model_type}, which has an encoder", _FULL)
        planned = transformers.DynamicCache(config=config).layers
        for number, layer in enumerate(planned):
            if type(layer) is not DynamicLayer:
                raise errors.BadInput("config", f"layer {number} needs a {type(layer).__name__}", _FULL)
        self._local = None if local is None else arguments.whole("local", local, 0)
        self._config, self._pool = config, pool
        self._device = device_of(pool)
        self._order = order(self._device)
        self._parked: Parked | None = None
        self._used: list[Parked] = []
        """Not `_parked` (yet, or any more), and to be closed, be it after an interruption."""
        self._moved: list[DynamicLayer] = []
        """Layers whose tensors are parked."""
        self._closed = False
        self._count: dict[int, int] = {}
        """Layer → bytes after its last update."""
        self._total = 0
        super().__init__(layers=[DynamicLayer() for _ in planned])

    # --- what transformers looks at ---

    @property
    def layers(self) -> list[DynamicLayer]:
        """Whatever uses the cache comes past here. Raises InUse while it is parked, EmaError when it is closed."""
        self._check_open()
        if self._parked is not None:
            raise errors.InUse("this cache is parked: resume() it first, or reset() it to begin anew")
        return self._layers

    @layers.setter
    def layers(self, layers: list[DynamicLayer]) -> None:
        self._layers = layers

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401 - as the base class has it
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to a layer; all of its keys and values.

        Raises LimitReached when they would be more than `local` bytes: then the cache is as it was before this call of
        the model. Raises InUse (parked), BadInput (another device), EmaError (compiled, captured).
        """
        if torch.compiler.is_compiling() or self._order.capturing():
            raise errors.EmaError("this cache grows at each step: it cannot be compiled or captured into a graph")
        layers = self.layers
        if layer_idx >= len(layers):
            raise errors.BadInput("layer_idx", layer_idx, f"less than the {len(layers)} layers of the config")
        for name, tensor in (("key_states", key_states), ("value_states", value_states)):
            if tensor.device != self._device:
                raise errors.BadInput(name, f"on {tensor.device}", f"on {self._device}, the pool's own GPU")
        more = key_states.nbytes + value_states.nbytes
        if self._local is not None and self._total + more > self._local:
            self._recount()
            if self._total + more > self._local:
                self._forget_step(layer_idx)
                raise self._too_much(self._total + more)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        now = keys.nbytes + values.nbytes
        self._total += now - self._count.get(layer_idx, 0)
        self._count[layer_idx] = now
        return keys, values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch. Raises LimitReached, InUse (parked)."""
        if self._local is not None and (wanted := self.nbytes * repeats) > self._local:
            raise self._too_much(wanted)
        super().batch_repeat_interleave(repeats)
        self._recount()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences of the batch. Raises InUse (parked)."""
        super().batch_select_indices(indices)
        self._recount()

    def reset(self) -> None:
        """Begin anew with an empty cache. What was parked, or lost, is given back."""
        self._check_open()
        self._give_back()

    # --- what is ours ---

    @property
    def parked(self) -> bool:
        """Whether keys and values lie on neighbours."""
        return self._parked is not None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, wherever they are."""
        return self._parked.nbytes if self._parked is not None else sum(t.nbytes for t in _tensors(self._layers))

    def park(self, *, droppable: bool = False, timeout: float = 2.0) -> None:
        """Move all keys and values to neighbours and drop the local ones. A cache that is parked or empty stays so.

        The pool may take `droppable` ones back without keeping them, and `resume` says so. Waits up to `timeout`
        seconds for memory. Raises PoolFull, LimitReached, OutOfMemory, AgentLost, DataLost, Reclaimed, and BadInput for
        tensors that need a gradient: whatever it raises, the cache stays local and goes on.
        """
        timeout = arguments.seconds("timeout", timeout)
        self._check_open()
        if self._parked is not None:
            return
        moved = [layer for layer in self._layers if layer.is_initialized and layer.keys.numel()]
        tensors = _tensors(moved)
        if any(t.requires_grad for t in tensors):
            raise errors.BadInput("cache", "of tensors that need a gradient", "one made under torch.no_grad()")
        if not tensors:
            return
        self._moved = moved
        try:
            self._sweep()
            self._used.append(Parked(self._pool, tensors, timeout, droppable=bool(droppable)))
            self._used[-1].store(tensors)
            self._parked = self._used[-1]
        finally:
            self._sweep()
        for layer in moved:
            layer.keys = layer.values = None

    def resume(self) -> None:
        """Bring all keys and values back, equal bit for bit. One that is not parked stays as it is.

        Raises OutOfMemory (it stays parked: try again), and AgentLost, DataLost or, of a droppable one, Reclaimed (it
        is lost: `reset` it and compute it again, or `close` it).
        """
        self._check_open()
        if self._parked is None:
            return
        self._used = [self._parked]
        found = self._parked.fetch()
        for layer, keys, values in zip(self._moved, found[::2], found[1::2], strict=True):
            layer.keys, layer.values = keys, values
        self._parked, self._moved = None, []
        self._sweep()

    def close(self) -> None:
        """Give everything back, local and remote. Twice is harmless."""
        self._closed = True
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        how = "closed" if self._closed else "parked" if self.parked else "local"
        return f"ElasticCache({len(self)} layers, {self.nbytes} bytes, {how})"

    def __deepcopy__(self, _: object) -> "ElasticCache":
        """One with the same keys and values, for the same pool."""
        made = ElasticCache(self._config, self._pool, local=self._local)
        for mine, its in zip(self.layers, made.layers, strict=True):
            if mine.is_initialized:
                its.lazy_initialization(mine.keys, mine.values)
                its.keys, its.values = mine.keys.clone(), mine.values.clone()
        made._recount()
        return made

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise errors.EmaError("an ElasticCache has a connection, which cannot be pickled; copy.deepcopy works")

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EmaError("this cache is closed")

    def _give_back(self) -> None:
        if self._parked is not None:
            self._used.append(self._parked)
        self._parked, self._moved = None, []
        for layer in self._layers:
            _clear(layer)
        self._recount()
        self._sweep()

    def _sweep(self) -> None:
        while self._used:
            if self._used[-1] is not self._parked:
                self._used[-1].close()
            self._used.pop()

    def _recount(self) -> None:
        """Layers may have been cropped, or have lost sequences of the batch."""
        self._count = {i: sum(t.nbytes for t in _tensors([layer])) for i, layer in enumerate(self._layers)}
        self._total = sum(self._count.values())

    def _forget_step(self, layer_idx: int) -> None:
        """Drop from the layers before this one the tokens that this one could not take."""
        kept = self._layers[layer_idx].get_seq_length()
        for layer in self._layers:
            if layer.get_seq_length() > kept:
                if kept:
                    layer.keys, layer.values = layer.keys[..., :kept, :], layer.values[..., :kept, :]
                else:
                    _clear(layer)

    def _too_much(self, wanted: int) -> errors.LimitReached:
        return errors.LimitReached(f"the cache would hold {wanted} bytes; local is {self._local}")


def _tensors(layers: Sequence[DynamicLayer]) -> list[torch.Tensor]:
    return [t for layer in layers if layer.is_initialized for t in (layer.keys, layer.values)]


def _clear(layer: DynamicLayer) -> None:
    layer.keys = layer.values = None
    layer.is_initialized = False
