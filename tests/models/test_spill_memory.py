"""What is spilled, what stays local, and where the bytes are meanwhile."""

from contextlib import ExitStack, closing

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ema
from ema.torch.memory import device_of
from models.spilling import KIB, Step, batch, check, mlp, scale, spilling
from nodes import Node


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
