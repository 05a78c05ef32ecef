"""Training with activations on lent memory: `python bench/training.py`. Needs a GPU. The lender is the host over PCIe.

A step is forward and backward of a decoder, Llama's shape, over one sequence. Four ways to hold its activations: all in
local memory, recomputed (every layer), torch's `save_on_cpu` with pinned memory, and `ema.torch.spill_activations`. On
16 multiprocessors (a scale model, see `on_gpu.py`) and on the whole GPU.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ema
import ema.torch
from on_gpu import GIB, MIB, link_rate, name, say, slice_of, spec, timed, versions
from record import Row, at_least, finish, plain, record
from server import Server

TOKENS: Final = 4096
CASES: Final = ((16, 2560, 12), (132, 4096, 12))
"""Multiprocessors, hidden size, layers."""
STEPS: Final = 6


class Layer(nn.Module):
    """Attention and a gated product, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.heads = width, width // 128
        made = partial(nn.Linear, bias=False, device="cuda", dtype=torch.bfloat16)
        self.qkv, self.out = made(width, 3 * width), made(width, width)
        self.up, self.down = made(width, 5376 * width // 1024), made(2688 * width // 1024, width)

    def forward(self, x: Any) -> Any:  # noqa: ANN401
        """Tokens × width."""
        heads = self.qkv(functional.rms_norm(x, (self.width,))).view(1, len(x), 3, self.heads, 128)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(len(x), self.width))
        gate, up = self.up(functional.rms_norm(x, (self.width,))).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """Layers in order."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Any, *, recompute: bool = False) -> Any:  # noqa: ANN401
        """Tokens × width; the loss."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x.float().square().mean()


def main() -> int:
    """Measure and keep."""
    torch.manual_seed(0)
    link = link_rate()
    rows = [plain("link, plain pinned copies", link / 1e9, "GB/s")]
    with Server(None, spec(12 * GIB, 128 * MIB)) as server, ema.connect(server.socket) as pool:
        for multiprocessors, width, layers in CASES:
            rows += case(pool, multiprocessors, width, layers)
    what = (
        f"Forward and backward of {TOKENS} tokens with activations held in four ways; the lender is the host over PCIe"
    )
    return finish(record("training", what, rows, gpu=name(), versions=versions()))


def case(pool: ema.Pool, multiprocessors: int, width: int, layers: int) -> Iterator[Row]:
    """One model on one slice of the GPU."""
    where = "whole GPU" if multiprocessors == 132 else f"scale model, {multiprocessors} multiprocessors"
    where = f"{where}, hidden size {width}"
    model, stream = Decoder(layers, width), slice_of(multiprocessors)
    x = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
    took: dict[str, float] = {}
    peak: dict[str, int] = {}
    gradients: dict[str, float] = {}

    def measure(label: str, context: Callable[[], Any], warm: int = 2, *, recompute: bool = False) -> None:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            with context():
                model(x, recompute=recompute).backward()

        with torch.cuda.stream(stream):
            for _ in range(warm):
                step()
        stream.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = timed(step, stream, STEPS, warm=1)
        took[label], peak[label] = times.median, torch.cuda.max_memory_allocated() - before
        gradients[label] = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        say(f"{where}: {label} {times}, {peak[label] / GIB:.2f} GiB more at the peak")

    measure("local", nullcontext)
    measure("recomputed", nullcontext, recompute=True)
    measure("save_on_cpu", lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    spill = ema.torch.spill_activations(pool)
    try:
        measure("borrowed", lambda: spill, warm=6)
        report = spill.report
    finally:
        spill.close()
    yield plain(f"{where}: local step", took["local"] * 1e3, "ms")
    yield plain(f"{where}: borrowed bytes a step", report.spilled_bytes / GIB, "GiB")
    for label in took:
        yield plain(f"{where}: memory above weights and gradients, {label}", peak[label] / GIB, "GiB")
    yield plain(f"{where}: slots of the borrower", report.slot_bytes / GIB, "GiB")
    for label in ("recomputed", "save_on_cpu"):
        yield plain(f"{where}: {label}, of local speed", 100 * took["local"] / took[label], "%")
    least = 96 if multiprocessors < 132 else 100 * took["local"] / took["save_on_cpu"]
    yield at_least(least, f"{where}: borrowed, of local speed", 100 * took["local"] / took["borrowed"], "%")
    yield plain(f"{where}: borrowed over recomputed", 100 * (took["recomputed"] / took["borrowed"] - 1), "%")
    apart = abs(gradients["borrowed"] / gradients["local"] - 1)
    yield plain(f"{where}: gradients' norm, borrowed against local", apart, "apart")


if __name__ == "__main__":
    sys.exit(main())
