"""One process of a distributed training, local and spilling: `ddp_worker.py SOCKET GPU RANK WORLD STORE`."""

import sys
from contextlib import closing, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ema
from ema.torch import Spill, spill_activations


def train(rank: int, spill: Spill | None) -> list[torch.Tensor]:
    """Weights after some steps: buckets of gradients are summed up while backward goes on."""
    torch.manual_seed(6)
    layers = [m for _ in range(6) for m in (nn.Linear(96, 96), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(64, 96, generator=torch.Generator().manual_seed(100 * rank + 10 * number + part))
            with model.no_sync() if part == 0 else nullcontext(), spill or nullcontext():
                model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def main() -> None:
    """Exit with 0 if both ways lead to the same weights, bit by bit."""
    socket, gpu, rank, world, store = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    wanted = train(int(rank), None)
    with (
        ema.connect(socket, gpu=gpu) as pool,
        closing(spill_activations(pool, fraction=1.0, min_bytes=8 << 10, slots=2)) as spill,
    ):
        found = train(int(rank), spill)
        report = spill.report
    dist.destroy_process_group()
    assert all(map(torch.equal, found, wanted)), "other weights"
    assert report.learnt == 1, report
    assert report.differing == 0, report
    assert report.spilled_bytes > 4 * 24 << 10, report


if __name__ == "__main__":
    main()
