"""The agent's data plane over simulated GPUs. Every node is looked at when it ends: nothing may be left."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import nodes
from nodes import Node


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for a socket."""
    return tmp_path_factory.mktemp("n")


@pytest.fixture
def make_node(folder: Path) -> Iterator[Callable[..., Node]]:
    """Makes a node of a simulation and pools."""
    with ExitStack() as stack:
        yield lambda *what: stack.enter_context(nodes.node(folder, *what))


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """Four GPUs of 64 MiB, chunks of 256 KiB."""
    return make_node()
