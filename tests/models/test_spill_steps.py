"""Training steps that are not as the learnt one: they stay local, or are learnt anew, and every gradient is right."""

from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
from ema.torch import Spill
from ema.torch.memory import device_of
from models.spilling import KIB, Step, batch, check, mlp, same, scale, spilling
from nodes import Node


def test_steps_that_differ_stay_local_and_are_learnt_when_they_last(client: ema.Pool) -> None:
    rows = [64, 64, 64, 96, 64, 32, 96, 96, 96, 64]

    def make() -> tuple[nn.Module, Step]:
        model = mlp(client)
        return model, lambda n: model(batch(client, n, rows=rows[n])).square().mean()

    report = check(client, make, steps=len(rows))
    assert report.learnt == 2
    assert report.differing == 5  # 96, 32, the two 96 that were learnt from, and the last


def test_two_shapes_in_turn_are_not_learnt_again_and_again(client: ema.Pool) -> None:
    rows = [64, 64, 96, 96] * 6

    def make() -> tuple[nn.Module, Step]:
        model = mlp(client)
        return model, lambda n: model(batch(client, n, rows=rows[n])).square().mean()

    report = check(client, make, steps=len(rows))
    assert report.learnt == 2
    assert report.differing == 2 + 10
    assert report.spilled_bytes > 0


def test_a_step_that_stops_in_the_middle(client: ema.Pool) -> None:
    class Stop(Exception):
        pass

    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client)
        for number in range(9):
            stop = number in (3, 5)
            with suppress(Stop), spill or nullcontext():
                hidden = model[:9](batch(client, number))
                if stop:
                    raise Stop
                loss = model[9:](hidden).square().mean()
                if number != 6:  # forward alone
                    loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert (spill.report.learnt, spill.report.differing) == (1, 3)


def test_backward_that_fails_in_the_middle(client: ema.Pool) -> None:
    class Stop(Exception):
        pass

    def fail(_: torch.Tensor) -> None:
        raise Stop

    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client)
        for number in range(7):
            with spill or nullcontext():
                hidden = model[:8](batch(client, number))
                if number == 4:
                    hidden.register_hook(fail)
                loss = model[8:](hidden).square().mean()
                if number == 4:
                    with pytest.raises(Stop):
                        loss.backward()
                    model.zero_grad()
                else:
                    loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert spill.report.learnt == 1


def test_backward_in_another_order(client: ema.Pool) -> None:
    """Two losses, of which now the one and now the other goes back first."""

    def train(spill: Spill | None) -> list[torch.Tensor]:
        one, two = mlp(client, depth=6), mlp(client, depth=6)
        for number in range(7):
            with spill or nullcontext():
                losses = [m(batch(client, number)).square().mean() for m in (one, two)]
                for loss in losses if number in (0, 1, 2, 4) else reversed(losses):
                    loss.backward()
        return [p.grad for m in (one, two) for p in m.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert spill.report.learnt == 2


def test_only_a_part_goes_back(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        one, two = mlp(client, depth=6), mlp(client, depth=6)
        for number in range(6):
            with spill or nullcontext():
                losses = [m(batch(client, number)).square().mean() for m in (one, two)]
                for loss in losses if number != 4 else losses[:1]:
                    loss.backward()
        return [p.grad for m in (one, two) for p in m.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert (spill.report.learnt, spill.report.differing) == (1, 1)


def test_a_second_derivative_now_and_then(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client, depth=24)
        for number in range(8):
            x = batch(client, number).requires_grad_(number in (4, 6))
            with spill or nullcontext():
                loss = model(x).square().mean()
                if x.requires_grad:
                    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                    loss = loss + slope.square().sum()
                loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert spill.report.in_place_bytes > 0


def test_an_interrupted_step(torch_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as client:
        interrupt_steps(client, monkeypatch)


def interrupt_steps(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(client)

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(batch(client, number)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = step(1)
    with closing(spilling(client)) as spill:
        for _ in range(3):
            with spill:
                step(1)
        for name in ("wait_empty", "wait"):
            with monkeypatch.context() as patch:
                patch.setattr(ema.Slot, name, interrupted(getattr(ema.Slot, name), after=3))
                with pytest.raises(KeyboardInterrupt), spill:
                    step(1)
            for _ in range(2):
                with spill:
                    same(step(1), wanted)
            assert spill.report.spilled_bytes > 0


@pytest.mark.parametrize("in_place", [True, False])
def test_an_agent_that_is_lost_at_any_wait(torch_node: Node, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as client:
        model = mlp(client, depth=24)

        def step() -> list[torch.Tensor]:
            model.zero_grad()
            model(batch(client, 1)).square().mean().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        wanted = step()
        with closing(spilling(client, in_place=in_place)) as spill:
            for _ in range(3):
                with spill:
                    step()
            waits = round(spill.report.spilled_bytes / (32 * KIB))
            assert bool(spill.report.in_place_bytes) is in_place
            for name, number in [("wait_empty", n) for n in (1, 2, 9)] + [("wait", n) for n in range(1, waits + 1)]:
                call = interrupted(getattr(ema.Slot, name), number, ema.AgentLost)
                with monkeypatch.context() as patch:
                    patch.setattr(ema.Slot, name, call)
                    if (name, number) == ("wait_empty", 1):  # nothing has left yet
                        with spill:
                            same(step(), wanted)
                    else:
                        with pytest.raises(ema.AgentLost), spill:
                            step()
                with spill:
                    same(step(), wanted)
                assert spill.report.spilled_bytes > 0


def interrupted(
    what: Callable[..., object], after: int, by: type[BaseException] = KeyboardInterrupt
) -> Callable[..., object]:
    """The same call, which raises when it was made so often."""
    calls = 0

    def call(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == after:
            raise by
        return what(*args)

    return call


STEP = st.tuples(
    st.sampled_from([32, 32, 32, 48]), st.sampled_from(["whole", "whole", "whole", "stop", "forward", "twice", "kept"])
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    widths=st.lists(st.sampled_from([16, 40, 64]), min_size=3, max_size=8),
    steps=st.lists(STEP, min_size=1, max_size=8),
    slots=st.integers(1, 3),
    fraction=st.sampled_from([0.4, 1.0]),
    watch=st.sampled_from(["local", "host"]),
)
def test_any_shapes_and_any_steps(
    client: ema.Pool, *, widths: list[int], steps: list[tuple[int, str]], slots: int, fraction: float, watch: str
) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        layers = [m for a, b in pairwise([16, *3 * widths]) for m in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*layers).to(device_of(client))
        kept: list[torch.Tensor] = []
        for number, (rows, kind) in enumerate([(32, "whole")] * 2 + steps):
            with suppress(ZeroDivisionError), spill or nullcontext():
                hidden = model[: len(layers) // 2](batch(client, number, rows, 16))
                if kind == "stop":
                    raise ZeroDivisionError
                loss = model[len(layers) // 2 :](hidden).square().mean()
                if kind == "kept":
                    kept.append(loss)
                elif kind != "forward":
                    loss.backward(retain_graph=kind == "twice")
                if kind == "twice":
                    loss.backward()
        for loss in kept:
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted = train(None)
    with closing(
        spilling(client, slots=slots, fraction=fraction, watch=watch, min_bytes=2 * KIB * scale(client))
    ) as spill:
        found = train(spill)
    if wanted:
        same(found, wanted)
