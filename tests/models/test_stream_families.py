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
from models.streaming import same, state

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def causal(kind: str, **more: object) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def llama() -> nn.Module:
    return causal("Llama", tie_word_embeddings=True)


def qwen2() -> nn.Module:
    return causal("Qwen2", tie_word_embeddings=False)


def qwen3() -> nn.Module:
    return causal("Qwen3", tie_word_embeddings=True)


def mixtral() -> nn.Module:
    return causal("Mixtral", num_local_experts=4, num_experts_per_tok=2)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=64, n_layer=5, n_head=4, vocab_size=96, n_positions=64, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    small = {k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=96, max_position_embeddings=64, **small))


def albert() -> nn.Module:
    small = {k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.AlbertConfig(vocab_size=96, embedding_size=32, max_position_embeddings=64, **small)
    return transformers.AlbertModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, vocab_size=96, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("resident", [0.0, 0.6])
@pytest.mark.parametrize("make", [llama, qwen2, qwen3, mixtral, gpt2, bert, albert, t5])
@torch.no_grad()
def test_a_family(client: ema.Pool, make: Callable[[], nn.Module], resident: float) -> None:
    if client.granularity > 4096:
        pytest.skip("its layers are smaller than a grain of this GPU")
    torch.manual_seed(3)
    model = make().eval()
    ids = torch.randint(1, 96, (2, 7))
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
    if client.granularity > 4096:
        pytest.skip("its layers are smaller than a grain of this GPU")
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 64)
    wanted, before = model(x), state(model)
    ema.torch.stream(model, client, resident=0.4)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    ema.torch.unstream(model)


@torch.no_grad()
def test_saved_and_loaded_again(client: ema.Pool, tmp_path: Any) -> None:  # noqa: ANN401
    if client.granularity > 4096:
        pytest.skip("its layers are smaller than a grain of this GPU")
    torch.manual_seed(3)
    model = llama().eval()
    before = state(model)
    ema.torch.stream(model, client, resident=0.5)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    same(again.state_dict(), before)
    same(torch.load(tmp_path / "plain.pt"), before)
    ema.torch.unstream(model)
