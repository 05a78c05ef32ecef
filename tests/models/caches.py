"""A small model, and what it generates with a cache."""

import inspect
from typing import Any

import torch
import transformers

import ema
from ema.torch.memory import device_of

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward)
CACHE = "cache" if "cache" in FORWARD.parameters else "past_key_values"
"""What transformers calls it: newer releases warn about the older name."""
PER_TOKEN = 3 * 2 * 2 * 8 * 4
"""Bytes of one token of one sequence: layers × (K, V) × heads × width × float32."""
CONFIGS = [transformers.LlamaConfig, transformers.Qwen2Config]


def model_of(client: ema.Pool, config: Any = transformers.LlamaConfig) -> Any:  # noqa: ANN401
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config(**SIZES)).eval()
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made.to(device_of(client)).requires_grad_(False)


def prompt_of(client: ema.Pool, rows: int = 2, tokens: int = 12) -> torch.Tensor:
    made = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(2))
    return made.to(device_of(client))


def go_on(model: Any, prompt: torch.Tensor, cache: Any, tokens: int = 6, **more: Any) -> Any:  # noqa: ANN401
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{CACHE: cache},
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )


def tensors(cache: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]


def same(found: Any, wanted: Any) -> None:  # noqa: ANN401
    assert torch.equal(found.sequences, wanted.sequences)
    for mine, its in zip(found.logits, wanted.logits, strict=True):
        assert torch.equal(mine, its)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, its in zip(found, wanted, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))
