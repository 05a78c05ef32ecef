"""What a caller gives a prefix store: each check gives plain values back, or raises BadInput."""

from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from ema import errors
from ema.transformers.layer import Layer
from ema.transformers.prefix_layout import Kind

Tokens: TypeAlias = "torch.Tensor | Sequence[int]"
_ONE: Final = "token ids of one sequence: whole numbers, (n,) or (1, n)"
_DIMENSIONS: Final = 4


def token_ids(tokens: Tokens, config: Any) -> "array[int]":  # noqa: ANN401 - any model's config
    """The ids of one sequence without padding before it."""
    found: Any = tokens
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() == 2 and tokens.shape[0] == 1:
            found = tokens[0]
        if found.dim() != 1:
            raise errors.BadInput("tokens", f"of shape {tuple(tokens.shape)}", _ONE)
        found = found.tolist()
    try:
        ids = array("q", list(found))
    except (TypeError, OverflowError):
        raise errors.BadInput("tokens", repr(tokens)[:80], _ONE) from None
    pad = getattr(config, "pad_token_id", None)
    if ids and ids[0] == pad and pad not in _ends(config):
        raise errors.BadInput(
            "tokens", f"begun with the padding token {pad}", "a sequence that is not padded on the left"
        )
    return ids


def keys_and_values(cache: transformers.Cache, layers: int, device: torch.device) -> list[torch.Tensor]:
    """Of each layer the keys, then the values: (1, heads, tokens, width)."""
    if not isinstance(cache, transformers.Cache):
        raise errors.BadInput("cache", repr(cache)[:80], "an ElasticCache or a DynamicCache")
    full = [layer for layer in cache.layers if type(layer) in (DynamicLayer, Layer) and layer.is_initialized]
    if len(full) != layers or len(cache.layers) != layers:
        what = f"of {len(cache.layers)} layers, {len(full)} of them with full attention and tokens"
        raise errors.BadInput("cache", what, f"of all {layers} layers of the config")
    pairs = [layer.whole() if isinstance(layer, Layer) else (layer.keys, layer.values) for layer in full]
    tensors = [t.detach() for pair in pairs for t in pair]
    for t in tensors:
        if t.dim() != _DIMENSIONS or t.shape[0] != 1:
            raise errors.BadInput("cache", f"of shape {tuple(t.shape)}", "of one sequence: (1, heads, tokens, width)")
        if t.device != device:
            raise errors.BadInput("cache", f"on {t.device}", f"on {device}, the pool's own GPU")
    return tensors


def kinds_of(tensors: Sequence[torch.Tensor]) -> tuple[Kind, ...]:
    """What they are, each."""
    return tuple(Kind(t.shape[1], t.shape[3], t.dtype) for t in tensors)


def _ends(config: Any) -> list[Any]:  # noqa: ANN401
    """Tokens that begin or end a sequence: with one of them a sequence may begin, be it for padding as well."""
    ends = getattr(config, "eos_token_id", None)
    return [getattr(config, "bos_token_id", None), *(ends if isinstance(ends, list) else [ends])]
