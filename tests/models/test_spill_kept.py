"""Who looks at saved tensors, or keeps them, sees true bytes: a slot is reused only when nobody holds it."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import ClassVar

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
from ema.torch import Spill
from models.spilling import batch, mlp, same, spilling


@pytest.fixture(autouse=True)
def kept_no_longer(client: ema.Pool) -> Iterator[None]:  # noqa: ARG001  (ends before it)
    yield
    Kept.seen = []


class Kept(torch.autograd.Function):
    """Keeps what it saved for longer than its backward, and returns it as a gradient, changed in place."""

    seen: ClassVar[list[torch.Tensor]] = []
    keeps = False

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, 2 * x)
        return x.square()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        x, double = ctx.saved_tensors
        if Kept.keeps:
            Kept.seen.append(x)
        return double.mul_(grad)


def test_functions_that_keep_what_they_saved(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        Kept.seen = []
        model = mlp(client, depth=24)
        for number in range(6):
            Kept.keeps = number >= 3
            with spill or nullcontext():
                hidden = batch(client, number)
                for layer in model:
                    hidden = Kept.apply(torch.tanh(layer(hidden)))
                hidden.mean().backward()
        return [*(p.grad for p in model.parameters()), *Kept.seen]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert spill.report.in_place_bytes > 0


def test_saved_tensors_that_are_looked_at(client: ema.Pool) -> None:
    looked: list[torch.Tensor] = []

    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client, depth=24)
        for number in range(5):
            hooks = []
            with spill or nullcontext():
                hidden = batch(client, number)
                for layer in model:
                    hidden = layer(hidden)
                    if isinstance(layer, nn.GELU):
                        node = hidden.grad_fn
                        look = lambda _, node=node: looked.append(node._saved_self.detach())  # noqa: E731
                        hooks.append(hidden.register_hook(look))
                loss = hidden.square().mean()
                looked.append(model[0](batch(client, 0)).grad_fn.next_functions[0][0] is not None or loss.detach())
                loss.backward()
            for hook in hooks:  # each holds its node, which holds it
                hook.remove()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    half, looked = looked, []
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
    tensors = [[t for t in seen if isinstance(t, torch.Tensor)] for seen in (looked, half)]
    same(*tensors)


def test_a_slot_that_is_never_let_go(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a node of torch's own kept what it was given, in a step that seemed to go as learnt."""
    monkeypatch.setattr("ema.torch.spill_context.called_by_engine", lambda _: True)
    model, keep = mlp(client, depth=24), False

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            if keep:
                Kept.seen.append(x)
            return grad * x.exp()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        hidden = batch(client, 1)
        for layer in model:
            hidden = Seen.apply(layer(hidden) * 0.1)
        hidden.mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = step()
    Kept.seen, keep = [], True
    step()
    keep, right = False, Kept.seen
    Kept.seen = []
    with closing(spilling(client)) as spill:
        for _ in range(3):
            with spill:
                same(step(), wanted)
        assert spill.report.in_place_bytes > 0
        keep = True
        with pytest.raises(ema.InUse, match="in_place=False"), spill:
            step()
        keep = False
        for _ in range(3):
            with spill:
                same(step(), wanted)
        assert spill.report.in_place_bytes == 0
        assert spill.report.spilled_bytes > 0
        same(Kept.seen, right[: len(Kept.seen)])
        Kept.seen = []
