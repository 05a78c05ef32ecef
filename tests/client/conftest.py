"""A node shared by the tests of one file."""

from collections.abc import Iterator

import pytest

import ema
from ema_driver.sim import GpuGroup
from nodes import MIB, Node, node, pool, sim


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    config = sim(gpus=(GpuGroup(count=4, memory=16 * MIB),), link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki")) as it:
        yield it


@pytest.fixture
def client(shared_node: Node) -> Iterator[ema.Pool]:
    """A client on GPU 0; what it held is free again after the test."""
    shared_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    before = shared_node.memory(1), shared_node.memory(2)
    with ema.connect(shared_node.socket, gpu=shared_node.gpus[0]) as it:
        yield it
    shared_node.until(lambda a: not a.sessions, saying="the session has ended")
    assert (shared_node.memory(1), shared_node.memory(2)) == before
