"""Activations that wait for their backward in a neighbour's memory: gradients are bit by bit those of local steps."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ema
from ema.torch import Spill, SpillReport, spill_activations
from ema.torch.memory import device_of
from nodes import Node

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


def test_gradients_are_those_of_local_steps(client: ema.Pool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = mlp(client)
        return model, lambda n: model(batch(client, n)).square().mean()

    report = check(client, make)
    assert (report.steps, report.learnt, report.differing) == (5, 1, 0)
    # Inputs of the layers and of the activations between them, but for what backward uses first.
    item = 32 * KIB * scale(client)
    assert 8 * item <= report.spilled_bytes <= 15 * item
    assert 0 < report.slot_bytes <= report.spilled_bytes / 3
    assert not report.limited


def test_gradients_of_a_llama(client: ema.Pool) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(2)
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        model = transformers.LlamaForCausalLM(config).to(device_of(client))

        def loss(number: int) -> torch.Tensor:
            tokens = torch.randint(128, (4 * scale(client), 32), generator=torch.Generator().manual_seed(number))
            tokens = tokens.to(device_of(client))
            return model(input_ids=tokens, labels=tokens).loss

        return model, loss

    report = check(client, make)
    assert (report.learnt, report.differing) == (1, 0)
    assert report.spilled_bytes > 512 * KIB * scale(client)


def test_gradients_under_autocast(client: ema.Pool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model, device = mlp(client), device_of(client)

        def loss(number: int) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return model(batch(client, number, rows=128)).float().square().mean()

        return model, loss

    report = check(client, make)
    assert (report.learnt, report.differing) == (1, 0)
    assert report.spilled_bytes > 0


def test_gradients_add_up_over_micro_batches(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            for part in range(3):
                with spill or nullcontext():
                    model(batch(client, 10 * number + part)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert (spill.report.steps, spill.report.learnt, spill.report.differing) == (9, 1, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_blocks_that_are_recomputed(client: ema.Pool, reentrant: bool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = mlp(client)
        first, middle, last = model[:6], model[6:10], model[10:]

        def loss(number: int) -> torch.Tensor:
            hidden = first(batch(client, number))
            hidden = checkpoint(middle, hidden, use_reentrant=reentrant)
            return last(hidden).square().mean()

        return model, loss

    report = check(client, make)
    assert (report.learnt, report.differing) == (1, 0)
    assert report.spilled_bytes >= 5 * 32 * KIB * scale(client)


def test_backward_after_the_context(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client)
        for number in range(4):
            with spill or nullcontext():
                loss = model(batch(client, number)).square().mean()
            loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert spill.report.learnt == 1
        assert spill.report.spilled_bytes > 0


def test_backward_twice(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client)
        for number in range(5):
            with spill or nullcontext():
                loss = model(batch(client, number)).square().mean()
                loss.backward(retain_graph=number >= 2)
                if number >= 2:
                    loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert (spill.report.learnt, spill.report.differing) == (1, 0)
        assert spill.report.spilled_bytes > 0


def test_second_derivatives(client: ema.Pool) -> None:
    def train(spill: Spill | None) -> list[torch.Tensor]:
        model = mlp(client)
        for number in range(4):
            x = batch(client, number).requires_grad_()
            with spill or nullcontext():
                out = model(x).square().mean()
                (slope,) = torch.autograd.grad(out, x, create_graph=True)
                (out + slope.square().sum()).backward()
        return [p.grad for p in model.parameters()]

    wanted = train(None)
    with closing(spilling(client)) as spill:
        same(train(spill), wanted)
        assert spill.report.spilled_bytes > 0


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


def test_changes_in_place_are_seen(client: ema.Pool) -> None:
    model = mlp(client)

    def step(number: int, change: int | None) -> None:
        hidden = batch(client, number)
        kept: list[torch.Tensor] = []
        for layer in model:
            hidden = layer(hidden)
            kept.append(hidden)
        if change is not None:
            with torch.no_grad():
                kept[change].add_(1)
        hidden.square().mean().backward()

    with closing(spilling(client)) as spill:
        for number in range(3):
            with spill:
                step(number, None)
        assert spill.report.spilled_bytes > 0
        for change in range(len(model) - 1):
            for stand in (nullcontext(), spill):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"), stand:
                    step(4, change)
        with spill:
            step(5, None)


def test_what_outlives_the_step_or_is_small_stays(client: ema.Pool) -> None:
    weight = torch.randn(256, 256, device=device_of(client), requires_grad=True)
    x = torch.randn(256 * scale(client), 256, device=device_of(client))

    def loss() -> torch.Tensor:
        hidden = x
        for _ in range(6):
            hidden = hidden @ weight.t()
        return hidden.square().mean()

    with closing(spilling(client)) as spill:
        for _ in range(4):
            with spill:
                loss().backward()
        # Six products and the square save x, five results in the middle, the last one, and the weight six times.
        assert spill.report.spilled_bytes + spill.report.kept_bytes == 6 * 256 * KIB * scale(client)
    with closing(spilling(client, min_bytes=257 * KIB * scale(client))) as spill:
        for _ in range(4):
            with spill:
                loss().backward()
        assert spill.report.spilled_bytes == spill.report.kept_bytes == 0


def test_less_is_spilled_of_a_budget_and_of_a_part(client: ema.Pool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = mlp(client)
        return model, lambda n: model(batch(client, n)).square().mean()

    unit = KIB * scale(client)
    all_of_it = check(client, make).spilled_bytes
    half = check(client, make, fraction=0.5).spilled_bytes
    assert 0 < half <= all_of_it / 2
    assert check(client, make, budget=100 * unit).spilled_bytes == 96 * unit
    assert check(client, make, fraction=0.0).spilled_bytes == 0
    by_itself = check(client, make, fraction="auto")
    assert 0 < by_itself.spilled_bytes <= all_of_it


def test_what_is_not_to_be_had(torch_node: Node) -> None:
    model: nn.Module

    def step(number: int) -> None:
        model(batch(client, number)).square().mean().backward()

    with ExitStack() as stack:
        client = stack.enter_context(ema.connect(torch_node.socket, gpu=torch_node.gpus[0]))
        model = mlp(client)
        asked = stack.enter_context(closing(spilling(client, timeout=0.0)))
        fitted = stack.enter_context(closing(spilling(client, fraction="auto", timeout=0.0)))
        for number in range(2):
            for spill in (asked, fitted):
                with spill:
                    step(number)
        others = torch_node.gpus[1:]
        held = [torch_node.take_what_is_free(gpu) for gpu in (1, 2)]
        stack.callback(torch_node.outsider.release, held)
        torch_node.until(lambda a: not any(a.node.free(gpu) for gpu in others), saying="the agent sees it")
        for _ in range(2):
            with pytest.raises(ema.PoolFull), asked:
                raise AssertionError("nothing was run")
        for number in range(2):
            with fitted:
                step(number)
        assert fitted.report.limited
        assert fitted.report.spilled_bytes == 0


def test_what_is_spilled_is_not_in_local_memory(client: ema.Pool) -> None:
    model = mlp(client, depth=16)
    there: list[int] = []

    def step(number: int) -> None:
        hidden, seen = batch(client, number), []
        for layer in model:
            hidden = layer(hidden)
            seen.append(StorageWeakRef(hidden.untyped_storage()))
        loss = hidden.square().mean()
        del hidden
        there.append(sum(not ref.expired() for ref in seen))
        loss.backward()

    with closing(spilling(client)) as spill:
        for number in range(4):
            with spill:
                step(number)
        assert there[0] == there[1] == 32
        assert there[2] == there[3] <= 32 - spill.report.spilled_bytes // (32 * KIB * scale(client)) + 1 <= 6


def test_steps_that_do_not_fit_are_watched_from_host_memory(client: ema.Pool) -> None:
    rows = [64, 64, 64, 96, 64, 64]
    there: list[int] = []

    def make() -> tuple[nn.Module, Step]:
        model = mlp(client, depth=16)

        def loss(number: int) -> torch.Tensor:
            hidden, seen = batch(client, number, rows=rows[number]), []
            for layer in model:
                hidden = layer(hidden)
                seen.append(StorageWeakRef(hidden.untyped_storage()))
            there.append(sum(not ref.expired() for ref in seen))
            return hidden.square().mean()

        return model, loss

    report = check(client, make, steps=len(rows), watch="host")
    assert (report.learnt, report.differing) == (1, 1)
    assert report.spilled_bytes > 24 * 32 * KIB * scale(client)
    assert report.in_place_bytes > 0
    local, spilled = there[:6], there[6:]
    assert local in ([31] * 6, [32] * 6)
    assert max(spilled) <= 5


def test_hooks_on_gradients(client: ema.Pool) -> None:
    heard: list[torch.Tensor] = []

    def make() -> tuple[nn.Module, Step]:
        model = mlp(client)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))

        def loss(number: int) -> torch.Tensor:
            hidden = model[:8](batch(client, number))
            hidden.register_hook(lambda grad: grad * 0.5)
            return model[8:](hidden).square().mean()

        return model, loss

    report = check(client, make)
    assert (report.learnt, report.differing) == (1, 0)
    half = len(heard) // 2
    same(heard[half:], heard[:half])


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


def test_arguments(client: ema.Pool) -> None:
    wrong = (
        ("fraction", 1.5),
        ("fraction", "all"),
        ("fraction", True),
        ("min_bytes", 0),
        ("slots", 0),
        ("budget", -1),
        ("watch", "gpu"),
    )
    for name, value in wrong:
        with pytest.raises(ema.BadInput, match=name):
            spilling(client, **{name: value})
    with pytest.raises(ema.BadInput, match="fraction"):
        spilling(client, fraction="auto", watch="host")
    with closing(spilling(client)) as spill, spill, pytest.raises(ema.InUse):
        spill.__enter__()
    with pytest.raises(ema.EmaError, match="closed"), spill:
        pass


def test_two_processes_that_sum_gradients_up(torch_node: Node, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("ddp_worker.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), torch_node.socket, torch_node.gpus[n], str(n), "2", str(tmp_path / "store")]
        )
        for n in range(2)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
