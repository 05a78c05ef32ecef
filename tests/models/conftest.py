"""torch on simulated GPUs: the CPU plays the kernels."""

from collections.abc import Iterator

import pytest

import ema
from ema_driver.sim import GpuGroup
from nodes import MIB, Node, node, pool, sim


@pytest.fixture(scope="module")
def torch_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Three GPUs of 64 MiB with slices of 4 KiB."""
    config = sim(gpus=(GpuGroup(count=3, memory=64 * MIB),), link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="256Ki")) as it:
        yield it


@pytest.fixture
def client(torch_node: Node) -> Iterator[ema.Pool]:
    """A client on GPU 0; what it held is free again after the test."""
    torch_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    before = [torch_node.memory(i) for i in range(3)]
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as it:
        yield it
    torch_node.until(lambda a: not a.sessions, saying="the session has ended")
    assert [torch_node.memory(i) for i in range(3)] == before
