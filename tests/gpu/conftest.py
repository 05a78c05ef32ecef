"""Tests that need an NVIDIA GPU; they are skipped where there is none."""

from collections.abc import Iterator

import pytest

from ema_driver import open_node
from ema_driver.errors import DriverUnavailable
from ema_driver.protocol import MemoryDriver


@pytest.fixture(scope="session")
def cuda() -> Iterator[MemoryDriver]:
    """A session with the real GPUs."""
    try:
        driver = open_node("cuda", "")
    except DriverUnavailable:
        pytest.skip("no GPU")
    with driver:
        yield driver
