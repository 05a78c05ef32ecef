"""Streamed models give what they gave before, bit by bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch

import ema
import ema.torch
from models.streaming import batch, same, stack, state
from nodes import Node


@pytest.mark.parametrize("resident", [0.0, 0.3, 0.75, 1.0])
@torch.no_grad()
def test_equal_outputs_and_bytes(client: ema.Pool, resident: float) -> None:
    model = stack(client)
    x, before = batch(client), state(model)
    wanted = model(x)
    assert ema.torch.stream(model, client, resident=resident) is model
    for _ in range(5):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    assert torch.equal(model(x), wanted)
    assert ema.torch.unstream(model) is model
    same(model.state_dict(), before)
    assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_what_it_reports(client: ema.Pool) -> None:
    model = stack(client)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ema.torch.stream(model, client, resident=0.0)
    told = ema.torch.report(model)
    assert told.resident == pytest.approx(0.0, abs=0.01)
    assert told.remote_bytes == pytest.approx(size, rel=0.05)
    assert told.saved_bytes == told.remote_bytes - told.window_bytes > 0
    ema.torch.unstream(model)
    with pytest.raises(ema.BadInput, match="not streamed"):
        ema.torch.report(model)


PROCESS = """
import sys
import torch
import ema, ema.torch
from models.streaming import batch, same, stack, state
with torch.no_grad(), ema.connect(sys.argv[1], gpu=sys.argv[2]) as client:
    model = stack(client)
    x, before = batch(client), state(model)
    wanted = model(x)
    ema.torch.stream(model, client, resident=0.0)
    for _ in range(20):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
print("equal")
"""


def test_two_processes_on_one_gpu(torch_node: Node) -> None:
    command = [sys.executable, "-c", PROCESS, torch_node.socket, torch_node.gpus[0]]
    paths = {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | paths) for _ in range(2)]
    for process in running:
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "equal\n")
