"""Models whose caches are soon beyond a local budget, and caches that are watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

import ema
from ema.torch.memory import device_of
from ema.transformers import ElasticCache
from models.caches import CACHE
from nodes import MIB

ROWS = 2


def model_of(client: ema.Pool, config: Any = transformers.LlamaConfig, layers: int = 8) -> Any:  # noqa: ANN401
    """One whose slots are not much more than its tokens, whatever the granularity."""
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(
        config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16 if client.granularity < MIB else 512,
            max_position_embeddings=512,
        )
    ).eval()
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made.to(device_of(client)).requires_grad_(False)


def per_token(model: Any, rows: int = ROWS) -> int:  # noqa: ANN401
    """Bytes of a token in all layers."""
    c = model.config
    width = c.head_dim if getattr(c, "head_dim", None) else c.hidden_size // c.num_attention_heads
    return c.num_hidden_layers * 2 * c.num_key_value_heads * width * 4 * rows


def budget(client: ema.Pool, model: Any, tokens: int, rows: int = ROWS) -> int:  # noqa: ANN401
    """Room for so many tokens beside slots that are nearly empty."""
    return 4 * client.granularity + tokens * per_token(model, rows)


def prompt_of_model(model: Any, tokens: int = 12) -> torch.Tensor:  # noqa: ANN401
    made = torch.randint(1, 64, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))
    return made.to(model.device)


def step(model: Any, cache: Any, rows: int, tokens: int = 1) -> torch.Tensor:  # noqa: ANN401
    """One call of the model, with tokens that depend on how many there were before; its logits."""
    start = cache.get_seq_length()
    given = (torch.arange(start, start + tokens) % 63 + 1).expand(rows, tokens).to(model.device)
    with torch.no_grad():
        logits: torch.Tensor = model(given, **{CACHE: cache}).logits
    return logits


def count(patch: pytest.MonkeyPatch, of: type, name: str, calls: list[int]) -> None:
    call = getattr(of, name)

    def counted(*given: Any, **named: Any) -> Any:  # noqa: ANN401
        calls[0] += 1
        return call(*given, **named)

    patch.setattr(of, name, counted)


def tries(action: Callable[[], object]) -> bool:
    """Whether there was memory for it."""
    try:
        action()
    except ema.PoolFull:
        return False
    return True


class Watched(ElasticCache):
    """Looks after every update of a layer whether the budget holds."""

    def update(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        found, now = super().update(*given, **named), self.report
        assert self._local is not None
        assert now.local_bytes + now.slot_bytes <= self._local
        return found


@contextmanager
def small_budget(client: ema.Pool) -> Iterator[tuple[Any, Any, Any]]:
    """A model, transformers' own cache, and one with a small budget."""
    model = model_of(client)
    plain = transformers.DynamicCache(config=model.config)
    with Watched(model.config, client, local=budget(client, model, 24)) as cache:
        yield model, plain, cache
