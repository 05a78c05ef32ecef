"""A key-value cache that goes on beyond its local budget, and can be parked between two calls of a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from ema import arguments, errors
from ema.torch.memory import device_of
from ema.torch.order import order
from ema.transformers.beyond import Beyond
from ema.transformers.budget import Plan, Size, plan, slots_at
from ema.transformers.layer import Layer
from ema.transformers.parked import Parked
from ema.transformers.report import CacheReport, report_of
from ema.transformers.rows import rows_of, size_of
from ema.transformers.slots import slots_for

if TYPE_CHECKING:
    from ema.pool import Pool

_FULL: Final = "the config of a decoder with full attention in every layer"


class ElasticCache(transformers.Cache):
    """For `past_key_values` (or `cache`) of `model.generate` and of a model's call; equal to `DynamicCache`, each bit.

    Keys and values of each layer are tensors of the pool's own GPU; those of the oldest tokens lie on neighbours once
    they are more than a local budget. `park` moves them all, `resume` brings them back. Not thread-safe. Use as a
    context manager, or `close` it.
    """

    def __init__(
        self,
        config: "transformers.PretrainedConfig",
        pool: "Pool",
        *,
        local: int | None = None,
        timeout: float = 2.0,
    ) -> None:
        """`config` is the model's.

        At most `local` bytes are held on the own GPU, keys, values and slots; what is more is kept on neighbours (None:
        all is local). `timeout`: seconds to wait for their memory at a call of the model. Raises BadInput: what is no
        config; sliding windows, linear attention, encoders.
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
        self._used: list[Parked | Beyond] = []
        """Not in use (yet, or any more), and to be closed, be it after an interruption."""
        self._moved: list[Layer] = []
        """Layers whose tensors are parked."""
        self._closed = False
        self._timeout = arguments.seconds("timeout", timeout)
        self._beyond: Beyond | None = None
        self._plan = Plan(0, 0)
        self._each = [0] * len(planned)
        """Bytes of a token in each layer; 0 before any was seen."""
        self._token = 0
        """Of all layers, those that have seen none taken to be like one that has."""
        super().__init__(layers=[Layer(number) for number in range(len(planned))])

    # --- what transformers looks at ---

    @property
    def layers(self) -> list[Layer]:
        """Whatever uses the cache comes past here. Raises InUse while it is parked, EmaError when it is closed."""
        self._check_open()
        if self._parked is not None:
            raise errors.InUse("this cache is parked: resume() it first, or reset() it to begin anew")
        return self._layers

    @layers.setter
    def layers(self, layers: list[Layer]) -> None:
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

        Raises PoolFull or LimitReached when they would be more than `local` bytes and no neighbour lends, or `local` is
        too little even so: then the cache is as it was before this call of the model. Raises InUse (parked), BadInput
        (another device), EmaError (compiled, captured); AgentLost, DataLost (what is on neighbours is gone).
        """
        if torch.compiler.is_compiling() or self._order.capturing():
            raise errors.EmaError("this cache grows at each step: it cannot be compiled or captured into a graph")
        layers = self.layers
        if layer_idx >= len(layers):
            raise errors.BadInput("layer_idx", layer_idx, f"less than the {len(layers)} layers of the config")
        for name, tensor in (("key_states", key_states), ("value_states", value_states)):
            if tensor.device != self._device:
                raise errors.BadInput(name, f"on {tensor.device}", f"on {self._device}, the pool's own GPU")
        if self._local is None or not key_states.numel():
            return layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return self._update_within(key_states, value_states, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raises InUse (parked)."""
        super().crop(tokens_to_remove)
        self._look()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch. Raises PoolFull, LimitReached, AgentLost, DataLost, InUse (parked)."""
        layers, tokens = self.layers, self.get_seq_length()
        self._each = [0] * len(layers)
        if self._local is not None and tokens:
            sizes = [replace(size, token=size.token * repeats) for size in self._sizes(*layers[0].local)]
            if self._exceeds(sum(size.token for size in sizes), tokens):
                beyond = self._grow(sizes, tokens)
                for layer in layers:
                    layer.store(self._plan.far, beyond)
                beyond.moved()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences of the batch. Raises InUse (parked)."""
        super().batch_select_indices(indices)
        self._each = [0] * len(self._layers)

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
        return self.report.local_bytes + self.report.remote_bytes

    @property
    def report(self) -> CacheReport:
        """Where keys and values are just now, and what that costs."""
        return report_of(self._layers, self._beyond, None if self._parked is None else self._parked.nbytes)

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
        moved = [layer for layer in self._layers if layer.is_initialized and layer.local[0].numel()]
        tensors = [t for layer in moved for t in layer.local]
        if any(t.requires_grad for t in tensors):
            raise errors.BadInput("cache", "of tensors that need a gradient", "one made under torch.no_grad()")
        if self._beyond is not None:
            self._beyond.check()
        if not tensors:
            return
        self._moved = moved
        try:
            self._sweep()
            parked = Parked(self._pool, tensors, timeout, droppable=bool(droppable))
            self._used.append(parked)
            parked.store(tensors)
            self._parked = parked
        finally:
            self._sweep()
        for layer in moved:
            layer.put_local(None, None)
        if self._beyond is not None:
            self._beyond.rest()

    def resume(self) -> None:
        """Bring all keys and values back, equal bit for bit. One that is not parked stays as it is.

        Raises OutOfMemory (it stays parked: try again), and AgentLost, DataLost or, of a droppable one, Reclaimed (it
        is lost: `reset` it and compute it again, or `close` it).
        """
        self._check_open()
        if self._parked is None:
            return
        self._used.append(self._parked)
        found = self._parked.fetch()
        for layer, keys, values in zip(self._moved, found[::2], found[1::2], strict=True):
            layer.put_local(keys, values)
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
        far = any(layer.far for layer in self._layers)
        how = "closed" if self._closed else "parked" if self.parked else "partly remote" if far else "local"
        return f"ElasticCache({len(self)} layers, {self.nbytes} bytes, {how})"

    def __deepcopy__(self, _: object) -> "ElasticCache":
        """One with the same keys and values, for the same pool."""
        made = ElasticCache(self._config, self._pool, local=self._local, timeout=self._timeout)
        try:
            for mine, its in zip(self.layers, made.layers, strict=True):
                if mine.get_seq_length():
                    made.update(*mine.whole(), mine.number)
                elif mine.is_initialized:
                    its.lazy_initialization(*mine.local)
        except BaseException:
            made.close()
            raise
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
            layer.reset()
        self._look()
        self._sweep()

    def _sweep(self) -> None:
        while self._used:
            if (used := self._used[-1]) is not self._parked and used is not self._beyond:
                used.close()
            self._used.pop()

    # --- the budget ---

    def _update_within(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layers[layer_idx]
        try:
            far = self._make_room(layer_idx, keys, values)
            if self._beyond is None or far <= layer.far:
                return layer.update(keys, values)
            every = layer.append_and_store(keys, values, far, self._beyond)
        except errors.EmaError:
            self._forget_step(layer_idx)
            raise
        if layer_idx == len(self._layers) - 1:
            self._beyond.moved()
        return every

    # Around a compiled model it is called, not traced.
    _update_within = torch.compiler.disable(_update_within)

    def _make_room(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """How many of the layer's tokens are to be remote after this update.

        Every layer is taken to get as many tokens as the first, so memory is borrowed before anything has changed.
        """
        more = keys.shape[-2]
        each = (keys.nbytes + values.nbytes) // more
        if self._each[layer_idx] != each:
            self._each[layer_idx] = each
            self._each = [known or each for known in self._each]
            self._token = sum(self._each)
        tokens = self._layers[layer_idx].get_seq_length() + more
        if self._exceeds(self._token, tokens):
            self._grow(self._sizes(keys, values), tokens)
        return min(self._plan.far, tokens)

    def _exceeds(self, token: int, tokens: int) -> bool:
        return self._local is not None and token * (tokens - self._plan.far) + self._plan.slots > self._local

    def _sizes(self, keys: torch.Tensor, values: torch.Tensor) -> list[Size]:
        """Of each layer; of those that are empty, as if their tokens were like these."""
        sizes = []
        for layer in self._layers:
            kind = rows_of(*(layer.local if layer.get_seq_length() else (keys, values)))
            token = kind.token_bytes * kind.key.shape[0]
            sizes.append(Size(layer.far, size_of(layer.rows), kind.stride, token))
        return sizes

    def _grow(self, sizes: Sequence[Size], tokens: int) -> Beyond:
        """Borrow for more remote tokens, which the layers then store. Raises PoolFull, LimitReached, AgentLost."""
        made = plan(sizes, tokens, self._local or 0, slots_for(len(sizes)), self._pool.granularity)
        if self._beyond is None:
            self._beyond = Beyond(self._pool, self._layers, self._timeout)
        try:
            self._beyond.reserve({number: size.after(made.far) for number, size in enumerate(sizes)})
        except errors.EmaError:
            self._look()
            raise
        self._plan = made
        return self._beyond

    def _forget_step(self, layer_idx: int) -> None:
        """Drop from the layers before this one the tokens that this one could not take."""
        kept = self._layers[layer_idx].get_seq_length()
        for layer in self._layers:
            if (more := layer.get_seq_length() - kept) > 0:
                layer.crop(-more)
            if not kept:
                layer.reset()
        self._look()

    def _look(self) -> None:
        """Layers may have lost tokens, or all that was remote."""
        if self._beyond is not None and self._beyond.empty:
            self._used.append(self._beyond)
            self._beyond = None
            self._sweep()
        sizes = [Size(layer.far, size_of(layer.rows), 0, 0) for layer in self._layers]
        far = max(size.far for size in sizes)
        self._plan = Plan(far, slots_at(sizes, far, slots_for(len(sizes)), self._pool.granularity))
