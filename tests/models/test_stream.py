"""Streamed models give what they gave before, bit by bit."""

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
import ema.torch
from ema.torch.memory import device_of
from nodes import MIB

torch.set_num_threads(1)
Bytes = dict[str, torch.Tensor]


def stack(client: ema.Pool, depth: int = 9, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Plain layers of four grains each."""
    torch.manual_seed(1)
    width = 1024 if client.granularity >= MIB else 64
    parts = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts).to(device_of(client), dtype)


def batch(client: ema.Pool, model: nn.Module) -> torch.Tensor:
    width = next(model.parameters()).shape[1]
    made = torch.randn(4, width, generator=torch.Generator().manual_seed(2))
    return made.to(device_of(client), next(model.parameters()).dtype)


def state(model: nn.Module) -> Bytes:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(found: Bytes, wanted: Bytes) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("resident", [0.0, 0.3, 0.75, 1.0])
@torch.no_grad()
def test_equal_outputs_and_bytes(client: ema.Pool, resident: float) -> None:
    model = stack(client)
    x, before = batch(client, model), state(model)
    wanted = model(x)
    assert ema.torch.stream(model, client, resident=resident) is model
    for _ in range(5):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    assert torch.equal(model(x), wanted)
    assert ema.torch.unstream(model) is model
    same(model.state_dict(), before)
    assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_what_it_reports(client: ema.Pool) -> None:
    model = stack(client)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ema.torch.stream(model, client, resident=0.0)
    told = ema.torch.report(model)
    assert told.resident == pytest.approx(0.0, abs=0.01)
    assert told.remote_bytes == pytest.approx(size, rel=0.05)
    assert told.saved_bytes == told.remote_bytes - told.window_bytes > 0
    ema.torch.unstream(model)
    with pytest.raises(ema.BadInput, match="not streamed"):
        ema.torch.report(model)
