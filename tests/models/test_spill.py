"""Activations that wait for their backward in a neighbour's memory: gradients are bit by bit those of local steps."""

import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ema
from ema.torch import Spill
from ema.torch.memory import device_of
from models.spilling import KIB, Step, batch, check, mlp, same, scale, spilling
from nodes import Node


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
