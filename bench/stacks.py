"""Transformer layers as benchmarks use them: a few large products a layer, and attention over a local cache."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """One layer, Llama's shape. `decode` makes it attend over a cache of `context` tokens; else tokens stand alone."""

    def __init__(self, width: int, inner: int, heads: int, dtype: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = nn.Linear(width, 3 * width, bias=False, device="cuda", dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, device="cuda", dtype=dtype)
        self.up = nn.Linear(width, 2 * inner, bias=False, device="cuda", dtype=dtype)
        self.down = nn.Linear(inner, width, bias=False, device="cuda", dtype=dtype)

    def forward(self, x: Any, cache: Any = None) -> Any:  # noqa: ANN401
        """`x`: tokens × width. `cache`: keys and values, each tokens × heads × context × width/heads."""
        q, k, v = self.qkv(functional.rms_norm(x, (self.width,))).view(len(x), 3, self.heads, -1).unbind(1)
        if cache is None:
            seen = v + k.mul(q)  # as cheap as can be: the products are what counts
        else:
            keys, values = cache
            keys[:, :, -1], values[:, :, -1] = k, v
            seen = functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values)
        x = x + self.out(seen.reshape(len(x), self.width))
        gate, up = self.up(functional.rms_norm(x, (self.width,))).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Stack(nn.Module):
    """Layers in order."""

    def __init__(self, layers: int, width: int, inner: int, heads: int = 32, dtype: Any = torch.bfloat16) -> None:  # noqa: ANN401
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, inner, heads, dtype) for _ in range(layers))
        self.requires_grad_(False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Any, caches: Any = None) -> Any:  # noqa: ANN401
        """Tokens × width, through all layers."""
        for number, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[number])
        return x

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())


def caches(layers: int, batch: int, heads: int, context: int, width: int) -> list[tuple[Any, Any]]:
    """Keys and values of `batch` requests for every layer."""
    shape = (batch, heads, context, width // heads)
    return [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(layers)
    ]
