"""Families of models from transformers and of torch's own, streamed with and without a local part."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers
from torch import nn

import ema
import ema.torch
from ema.torch.memory import device_of
from models.streaming import same, state, width_of

Sizes = dict[str, Any]
"""Of a model, under the names that most configs have."""
Make = Callable[[Sizes], nn.Module]


def sizes(client: ema.Pool) -> Sizes:
    """So that a layer is some grains."""
    width = 64 if client.granularity == 4096 else 1024
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }


def causal(kind: str, of: Sizes, **more: object) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**of, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def llama(of: Sizes) -> nn.Module:
    return causal("Llama", of, tie_word_embeddings=True)


def qwen2(of: Sizes) -> nn.Module:
    return causal("Qwen2", of, tie_word_embeddings=False)


def qwen3(of: Sizes) -> nn.Module:
    return causal("Qwen3", of, tie_word_embeddings=True)


def mixtral(of: Sizes) -> nn.Module:
    return causal("Mixtral", of, num_local_experts=4, num_experts_per_tok=2)


def gpt2(of: Sizes) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=of["hidden_size"], n_layer=5, n_head=4, vocab_size=96, n_positions=64, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def encoder(of: Sizes) -> Sizes:
    left_out = ("num_key_value_heads", "head_dim")
    return {name: size for name, size in of.items() if name not in left_out}


def bert(of: Sizes) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**encoder(of)))


def albert(of: Sizes) -> nn.Module:
    return transformers.AlbertModel(transformers.AlbertConfig(embedding_size=32, **encoder(of)))


def t5(of: Sizes) -> nn.Module:
    config = transformers.T5Config(
        d_model=of["hidden_size"],
        d_kv=of["head_dim"],
        d_ff=of["intermediate_size"],
        num_layers=3,
        num_heads=4,
        vocab_size=96,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("resident", [0.0, 0.6])
@pytest.mark.parametrize("make", [llama, qwen2, qwen3, mixtral, gpt2, bert, albert, t5])
@torch.no_grad()
def test_a_family(client: ema.Pool, make: Make, resident: float) -> None:
    torch.manual_seed(3)
    model = make(sizes(client)).eval().to(device_of(client))
    ids = torch.randint(1, 96, (2, 7)).to(device_of(client))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if make is t5:
        given["decoder_input_ids"] = ids
    wanted, before = model(**given)[0], state(model)
    generates = getattr(model, "can_generate", bool)()
    tokens = model.generate(**given, max_new_tokens=4, do_sample=False) if generates else None
    ema.torch.stream(model, client, resident=resident)
    assert ema.torch.report(model).remote_bytes > 0
    for _ in range(3):
        assert torch.equal(model(**given)[0], wanted)
    same(model.state_dict(), before)
    if tokens is not None:
        assert torch.equal(model.generate(**given, max_new_tokens=4, do_sample=False), tokens)
    ema.torch.unstream(model)
    same(model.state_dict(), before)
    assert torch.equal(model(**given)[0], wanted)


@torch.no_grad()
def test_an_encoder_of_torch(client: ema.Pool) -> None:
    width = width_of(client)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval().to(device_of(client))
    x = torch.randn(2, 5, width).to(device_of(client))
    wanted, before = model(x), state(model)
    ema.torch.stream(model, client, resident=0.4)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    ema.torch.unstream(model)


@torch.no_grad()
def test_saved_and_loaded_again(client: ema.Pool, tmp_path: Any) -> None:  # noqa: ANN401
    torch.manual_seed(3)
    model = llama(sizes(client)).eval().to(device_of(client))
    before = state(model)
    ema.torch.stream(model, client, resident=0.5)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    same(again.to(device_of(client)).state_dict(), before)
    same(torch.load(tmp_path / "plain.pt"), before)
    ema.torch.unstream(model)
