"""Tests that need an NVIDIA GPU; they are skipped where there is none."""

from collections.abc import Iterator

import pytest

from ema_driver.protocol import MemoryDriver
from real import gpus


@pytest.fixture(scope="session")
def cuda() -> Iterator[MemoryDriver]:
    """A session with the real GPUs."""
    with gpus() as driver:
        yield driver
