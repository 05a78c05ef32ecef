"""Simulation only: servers of their own, with faults. No fixture of the contract suite runs here."""

from collections.abc import Callable, Iterator

import pytest

from ema_driver.sim import GpuGroup, SimConfig, SimDriver, SimServer, start

MIB = 1 << 20
SMALL = SimConfig(
    gpus=(GpuGroup(count=3, memory=64 * MIB, reserved=4 * MIB),),
    host_memory=64 * MIB,
    granularity=4096,
    nvlink_rate=4_000_000_000,
    linger=0.2,
)


@pytest.fixture
def nothing_leaks() -> None:
    """Here every test has a server of its own."""


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[SimConfig], SimServer]]:
    """Starts servers, and stops them at the end."""
    servers: list[SimServer] = []

    def serve_one(config: SimConfig) -> SimServer:
        servers.append(start(config, tmp_path_factory.mktemp("s")))
        return servers[-1]

    yield serve_one
    for server in servers:
        server.stop()


@pytest.fixture
def driver(serve: Callable[[SimConfig], SimServer]) -> Iterator[SimDriver]:
    with SimDriver.connect(serve(SMALL).socket) as session:
        yield session
