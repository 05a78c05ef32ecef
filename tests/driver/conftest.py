"""The contract suite: every memory driver passes every test here. `backend` says which driver a test runs on."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ema_core.ids import GpuId
from ema_driver.protocol import MemoryDriver
from ema_driver.sim import GpuGroup, SimConfig, SimDriver, start

MIB = 1 << 20
PEER = Path(__file__).parent / "peer.py"


class Backend:
    """One driver on this machine."""

    def __init__(self, name: str, connect: Callable[[], MemoryDriver], address: str) -> None:
        self.name, self.connect, self.address = name, connect, address


@pytest.fixture(scope="session")
def sim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sim")


@pytest.fixture(scope="session", params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest, sim_folder: Path) -> Iterator[Backend]:
    if request.param == "cuda":
        pytest.skip("no GPU")
    config = SimConfig(
        gpus=(GpuGroup(count=4, memory=256 * MIB, reserved=16 * MIB),),
        host_memory=512 * MIB,
        granularity=64 << 10,
        nvlink_rate=8_000_000_000,
        pcie_rate=4_000_000_000,
    )
    server = start(config, sim_folder)
    try:
        yield Backend("sim", lambda: SimDriver.connect(server.socket), str(server.socket))
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def nothing_leaks(backend: Backend) -> Iterator[None]:
    """Free bytes after a test equal those before."""
    with backend.connect() as observer:
        before = observer.memory()
        yield
        assert observer.memory() == before


@pytest.fixture
def driver(backend: Backend, nothing_leaks: None) -> Iterator[MemoryDriver]:  # noqa: ARG001  (closed before it looks)
    with backend.connect() as session:
        yield session


@pytest.fixture
def gpus(driver: MemoryDriver) -> list[GpuId]:
    return [device.id for device in driver.devices()]


class Peer:
    """Another process (`peer.py`), with a socket to it."""

    def __init__(self, role: str, address: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(PEER), role, str(theirs.fileno()), address]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.link = ours
        self.link.settimeout(20)

    def tell(self, text: str, *fds: int) -> None:
        socket.send_fds(self.link, [text.encode()], list(fds))

    def hear(self) -> tuple[str, list[int]]:
        body, fds, _, _ = socket.recv_fds(self.link, 4096, 8, socket.MSG_CMSG_CLOEXEC)
        return body.decode(), fds

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()


@contextmanager
def peer(role: str, address: str) -> Iterator[Peer]:
    """Start one; it is killed at the end, if it was not before."""
    other = Peer(role, address)
    try:
        yield other
    finally:
        other.close()
