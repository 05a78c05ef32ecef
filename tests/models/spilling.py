"""Models to train, all local and spilling, whose gradients must be the same."""

from collections.abc import Callable
from contextlib import closing

import torch
from torch import nn

import ema
from ema.torch import Spill, SpillReport, spill_activations
from ema.torch.memory import device_of

torch.set_num_threads(1)

KIB = 1 << 10
Step = Callable[[int], torch.Tensor]
"""A loss from the number of the step."""


def scale(client: ema.Pool) -> int:
    """How many times as large tensors are: the slots of a real GPU are 2 MiB at least."""
    return 1 if device_of(client).type == "cpu" else 64


def mlp(client: ema.Pool, width: int = 128, depth: int = 8) -> nn.Module:
    torch.manual_seed(1)
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to(device_of(client))


def batch(client: ema.Pool, number: int, rows: int = 64, width: int = 128) -> torch.Tensor:
    return torch.randn(rows * scale(client), width, generator=torch.Generator().manual_seed(number)).to(
        device_of(client)
    )


def spilling(client: ema.Pool, **more: object) -> Spill:
    given = {"fraction": 1.0, "min_bytes": 16 * KIB * scale(client), "slots": 2, **more}
    return spill_activations(client, **given)  # type: ignore[arg-type]


def trained(model: nn.Module, loss: Step, spill: Spill | None, steps: int = 5) -> list[torch.Tensor]:
    """Gradients of some steps, each with the weights that the one before left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for number in range(steps):
        optimizer.zero_grad()
        if spill is None:
            loss(number).backward()
        else:
            with spill:
                loss(number).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return seen


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        if one.is_cuda:  # its products are not the same from run to run
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


def check(client: ema.Pool, make: Callable[[], tuple[nn.Module, Step]], steps: int = 5, **more: object) -> SpillReport:
    """Train twice from the same start, all local and spilling."""
    wanted = trained(*make(), None, steps)
    with closing(spilling(client, **more)) as spill:
        same(trained(*make(), spill, steps), wanted)
        return spill.report
