"""The contract suite: every memory driver passes every test here. `backend` says which driver a test runs on."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import pytest

from ema_core.ids import HOST, GpuId, Place
from ema_driver import open_node
from ema_driver.errors import DriverUnavailable, InvalidUse
from ema_driver.protocol import Copy, MemoryDriver, MemoryInfo, Wait
from ema_driver.sim import GpuGroup, SimConfig, start

MIB = 1 << 20
PEER = Path(__file__).parent / "peer.py"


@dataclass(frozen=True)
class Backend:
    """One driver on this machine."""

    name: str
    endpoint: str
    unit: int
    """Bytes of the memory that tests take."""
    slack: int
    """Bytes by which free memory may differ without a leak: what the driver itself takes now and then."""
    margin: int
    """Bytes shown free that no single creation can have."""
    gated: int
    """Streams that may wait for clients at once."""

    def connect(self) -> MemoryDriver:
        return open_node(self.name, self.endpoint)

    def taken(self, before: Mapping[Place, MemoryInfo], after: Mapping[Place, MemoryInfo]) -> dict[Place, int]:
        """Bytes by place that were free before and are not any more, or the other way round."""
        # The host's free memory is everybody's where it is not simulated.
        own = [p for p in before if p != HOST or self.name == "sim"]
        return {p: before[p].free - after[p].free for p in own if after[p].free != self.about(before[p].free)}

    def about(self, size: int) -> object:
        """Equal to this many bytes, but for the slack."""
        return pytest.approx(size, abs=self.slack)


@pytest.fixture(scope="session")
def sim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sim")


@pytest.fixture(scope="session", params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest, sim_folder: Path) -> Iterator[Backend]:
    if request.param == "cuda":
        try:
            warm = open_node("cuda", "")
        except DriverUnavailable:
            pytest.skip("no GPU")
        # Held open: a context that comes and goes with each test would be half a second and 500 MiB each time.
        with warm:
            _warm_up(warm)
            yield Backend("cuda", "", unit=32 * MIB, slack=12 * MIB, margin=1 << 30, gated=24)
        return
    config = SimConfig(
        gpus=(GpuGroup(count=4, memory=256 * MIB, reserved=16 * MIB),),
        host_memory=512 * MIB,
        granularity=64 << 10,
        nvlink_rate=8_000_000_000,
        pcie_rate=4_000_000_000,
    )
    server = start(config, sim_folder)
    try:
        yield Backend("sim", str(server.socket), unit=MIB, slack=0, margin=0, gated=40)
    finally:
        server.stop()


def _warm_up(driver: MemoryDriver) -> None:
    """Let the driver take what it takes once: queues, staging buffers, graph memory."""
    gpu = driver.devices()[0].id
    size = 64 * MIB
    at, handle = driver.reserve(size), driver.create(gpu, size)
    driver.map([(at, handle)])
    driver.write(at, driver.read(at, size))
    page = driver.words(64)
    streams = [driver.stream(gpu) for _ in range(28)]
    for i, stream in enumerate(streams):
        graph = stream.instantiate([Wait(page, i, 1), *[Copy(int(at), int(at) + size // 2, size // 2)] * 8])
        graph.launch()
        page.store(i, 1)
        assert stream.synchronize(10)
        graph.close()
        stream.close()
    page.close()
    driver.unmap([at])
    driver.release([handle])
    driver.unreserve([at])


@pytest.fixture
def unit(backend: Backend) -> int:
    return backend.unit


@pytest.fixture(autouse=True)
def nothing_leaks(backend: Backend) -> Iterator[None]:
    """Free bytes after a test equal those before."""
    with backend.connect() as observer:
        before = observer.memory()
        yield
        assert backend.taken(before, observer.memory()) == {}


@pytest.fixture
def driver(backend: Backend, nothing_leaks: None) -> Iterator[MemoryDriver]:  # noqa: ARG001  (closed before it looks)
    with backend.connect() as session:
        yield session


@pytest.fixture
def gpus(driver: MemoryDriver) -> list[GpuId]:
    """Four GPUs; where there are fewer, the same ones again."""
    return list(islice(cycle([device.id for device in driver.devices()]), 4))


class Peer:
    """Another process (`peer.py`), with a socket to it."""

    def __init__(self, role: str, backend: Backend) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(PEER), role, str(theirs.fileno()), backend.name, backend.endpoint]
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
def peer(role: str, backend: Backend) -> Iterator[Peer]:
    """Start one; it is killed at the end, if it was not before."""
    other = Peer(role, backend)
    try:
        yield other
    finally:
        other.close()


def guest_of(driver: MemoryDriver, gpu: GpuId) -> list[int]:
    """The descriptor that a borrower's session needs, if it needs one."""
    try:
        return [driver.guest(gpu)]
    except InvalidUse:
        return []
