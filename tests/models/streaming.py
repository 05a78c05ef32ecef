"""What the tests of streamed models share: plain models, and bytes that are compared."""

import torch
from torch import nn

import ema
from ema.torch.memory import device_of
from nodes import MIB

torch.set_num_threads(1)
Bytes = dict[str, torch.Tensor]


def width_of(client: ema.Pool) -> int:
    """So that one square matrix is at least two grains."""
    return 1024 if client.granularity >= MIB else 64


def stack(client: ema.Pool, depth: int = 9, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Plain layers."""
    torch.manual_seed(1)
    width = width_of(client)
    parts = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts).to(device_of(client), dtype).requires_grad_(False)


def batch(client: ema.Pool, dtype: torch.dtype = torch.float32, rows: int = 4) -> torch.Tensor:
    made = torch.randn(rows, width_of(client), generator=torch.Generator().manual_seed(2))
    return made.to(device_of(client), dtype)


def state(model: nn.Module) -> Bytes:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(found: Bytes, wanted: Bytes) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
