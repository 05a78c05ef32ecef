"""Models on lent memory: on simulated GPUs, where the CPU plays the kernels, and on a real one."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ema
from ema_driver.protocol import MemoryDriver, StreamOrdered
from ema_driver.sim import GpuGroup
from nodes import MIB, Node, node, pool, sim
from real import agent, gpus

SLACK = 64 * MIB
"""Bytes that CUDA takes and keeps for itself between two looks, at most: kernels are loaded as they are first used."""


@pytest.fixture(scope="module")
def torch_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Three GPUs of 64 MiB with slices of 4 KiB."""
    config = sim(gpus=(GpuGroup(count=3, memory=64 * MIB),), link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="256Ki")) as it:
        yield it


@pytest.fixture(scope="module")
def real_gpu() -> Iterator[MemoryDriver]:
    """A session with the real GPUs."""
    with gpus() as driver:
        yield driver


@pytest.fixture(scope="module")
def real_agent(real_gpu: MemoryDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:  # noqa: ARG001
    """Its socket's folder."""
    folder = tmp_path_factory.mktemp("real")
    with agent(folder):
        yield folder


@pytest.fixture
def forget_kinds() -> Iterator[None]:
    """Afterwards Python finds out anew what a driver can do: it remembers what one could while it was patched."""
    yield
    StreamOrdered._abc_caches_clear()  # type: ignore[attr-defined]


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def client(request: pytest.FixtureRequest) -> Iterator[ema.Pool]:
    """A client on GPU 0; what it held is free again after the test."""
    if request.param == "cuda":
        for it in _real(request.getfixturevalue("real_agent"), request.getfixturevalue("real_gpu")):
            yield it
            request.node.funcargs.clear()  # other fixtures' models, which are to be free again, too
    else:
        yield from _simulated(request.getfixturevalue("torch_node"))


def _simulated(torch_node: Node) -> Iterator[ema.Pool]:
    torch_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    before = [torch_node.memory(i) for i in range(3)]
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as it:
        yield it
    torch_node.until(lambda a: not a.sessions, saying="the session has ended")
    assert [torch_node.memory(i) for i in range(3)] == before


def _real(folder: Path, driver: MemoryDriver) -> Iterator[ema.Pool]:
    import torch

    def free() -> int:
        gc.collect()  # models hold themselves in circles
        torch.cuda.empty_cache()
        return driver.memory()[driver.devices()[0].id].free

    for dtype in (torch.float32, torch.bfloat16):
        _use_kernels(torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True))
    with ema.connect(folder / "client.sock"):
        pass  # whatever is made once
    before = free()
    with ema.connect(folder / "client.sock") as it:
        yield it
    end = time.monotonic() + 5
    while free() < before - SLACK and time.monotonic() < end:
        time.sleep(0.05)
    assert free() == pytest.approx(before, abs=SLACK)


def _use_kernels(a: Any) -> None:  # noqa: ANN401
    """What libraries make at first use, their workspaces among it."""
    import torch

    torch.nn.functional.layer_norm(a @ a, (64,)).softmax(-1).sum().backward()
