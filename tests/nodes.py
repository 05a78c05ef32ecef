"""A node under test: simulated GPUs in a process of their own, an agent on a thread, and clients.

The agent runs on a thread of the test's process, so that a test can look into it (`on_loop`, `until`). What has to hold
after every test is checked when the node ends: no lease, no byte, no process and no socket is left.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import ema
from borrower import pattern
from ema_agent.agent import Agent, Setup
from ema_agent.lease import State
from ema_core.api import MemoryPool, load_pools
from ema_core.ids import HOST, GpuId, Place
from ema_driver.errors import OutOfMemory
from ema_driver.protocol import Handle, MemoryInfo
from ema_driver.sim import GpuGroup, SimConfig, SimDriver, start

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20
PATIENCE = 10.0
"""Seconds after which something that has to happen counts as not happening."""

SMALL = SimConfig(
    gpus=(GpuGroup(count=4, memory=64 * MIB, reserved=MIB),),
    host_memory=512 * MIB,
    granularity=64 * KIB,
    nvlink_rate=4_000_000_000,
    pcie_rate=1_000_000_000,
    linger=0.2,
)
"""Four GPUs of 64 MiB."""
TINY = msgspec.structs.replace(SMALL, gpus=(GpuGroup(count=4, memory=16 * MIB, reserved=MIB),))
"""Four GPUs of 16 MiB, soon full."""

__all__ = ["KIB", "MIB", "SMALL", "TINY", "Borrower", "Node", "node", "pattern", "pool", "processes", "sim", "until"]


def sim(**changes: object) -> SimConfig:
    """`SMALL` with other values."""
    return msgspec.structs.replace(SMALL, **changes)


Part = Mapping[str, object]


def pool(
    name: str = "test",
    *,
    chunk: str = "256Ki",
    lending: Part | None = None,
    reclaim: Part | None = None,
    borrowing: Part | None = None,
) -> MemoryPool:
    """A pool in which bytes move at once: headroom of 2 MiB, no hysteresis, no minHold."""
    lent = {"maxPerGPU": "90%", "headroom": "2Mi", "hysteresis": "0", **(lending or {})}
    taken = {"hostMemory": "256Mi", "minHold": "0s", **(reclaim or {})}
    body = {"chunkSize": chunk, "lending": lent, "reclaim": taken, "borrowing": borrowing or {}}
    document = {"apiVersion": "ema.dev/v1alpha1", "kind": "MemoryPool", "metadata": {"name": name}, "spec": body}
    return load_pools([document])[0]


def until(what: Callable[[], T], *, within: float = PATIENCE, saying: str = "") -> T:
    """Wait until `what()` is true; its value. Fails after `within` seconds."""
    end = time.monotonic() + within
    while not (value := what()):
        assert time.monotonic() < end, f"not within {within:g} s: {saying or what}"
        time.sleep(0.001)
    return value


class Node:
    """One node. `agent` belongs to the loop on the agent's thread: reach it by `on_loop` and `until`."""

    def __init__(self, folder: Path, config: SimConfig = SMALL, *pools: MemoryPool, loopback: bool = False) -> None:
        self.folder, self.loopback = folder, loopback
        self.pools = pools or (pool(),)
        self.server = start(config, folder)
        self.observer = SimDriver.connect(self.server.socket)
        """A session of nobody's: reads memory, injects faults."""
        self.outsider = SimDriver.connect(self.server.socket)
        """A process that knows nothing of us and takes memory."""
        self.gpus: list[GpuId] = [d.id for d in sorted(self.observer.devices(), key=lambda d: d.pci)]
        """By number in the configuration."""
        self.before = self.observer.memory()
        self.socket = str(folder / "client.sock")
        self.clients: list[ema.Pool] = []
        self.borrowers: list[Borrower] = []
        self.start()

    # --- the agent ---

    def start(self) -> None:
        """Start an agent, and wait until it serves."""
        self.session = SimDriver.connect(self.server.socket)
        self.error: BaseException | None = None
        self.why_ended: str | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agent-under-test", daemon=True)
        self._thread.start()
        assert self._up.wait(30), "the agent did not start in 30 s"
        if self.error is not None:
            raise self.error
        until(lambda: self.agent.ready or self.error, within=30, saying="the agent is ready")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the test ends
            self.error = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        setup = Setup("sim", str(self.server.socket), self.folder, pair_limit=2.0, loopback=self.loopback)
        self.agent = Agent(self.session, self.pools, setup)
        self._up.set()
        await self.agent.run()
        self.why_ended = self.agent.why_ended

    def stop(self) -> None:
        """End the agent in good order."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.agent.stop)
            self._thread.join(30)
            assert not self._thread.is_alive(), "the agent did not end in 30 s"
        self.session.close()
        if self.error is not None:
            raise self.error

    def on_loop(self, what: Callable[[], T]) -> T:
        """Call on the agent's thread; its value."""

        async def call() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE)

    def until(self, what: Callable[[Agent], T], *, within: float = PATIENCE, saying: str = "") -> T:
        """Wait until something is true of the agent; its value."""
        return until(lambda: self.on_loop(lambda: what(self.agent)), within=within, saying=saying)

    def settle(self) -> None:
        """Wait until a plan finds nothing to do."""
        self.on_loop(self.agent.steward.wake)
        self.until(lambda a: a.steward.settled.is_set(), saying="plans find nothing to do")

    def all_clean(self) -> None:
        """Wait until every chunk has a true copy in host memory."""
        self.until(
            lambda a: all(c.state is State.CLEAN and not c.gate.dirty for c in a.ledger.chunks()),
            saying="every chunk has a twin",
        )

    def never_clean(self) -> None:
        """From now on no chunk gets a copy in host memory, which would save it."""
        self.on_loop(lambda: setattr(self.agent.cleaner, "_candidates", list))

    # --- clients and memory ---

    def connect(self, gpu: int = 0, name: str = "", pool: str = "") -> ema.Pool:
        """A client on a GPU; closed with the node."""
        client = ema.connect(self.socket, gpu=self.gpus[gpu], name=name, pool=pool)
        self.clients.append(client)
        return client

    def borrower(self, gpu: int = 0) -> "Borrower":
        """A client in a process of its own; ended with the node."""
        self.borrowers.append(Borrower(self.socket, self.gpus[gpu]))
        return self.borrowers[-1]

    def take(self, gpu: int, size: int) -> Handle:
        """Take memory of a GPU as a process would that knows nothing of us; `outsider.release` gives it back."""
        return self.outsider.create(self.gpus[gpu], size)

    def take_all_but(self, gpu: int, left: int) -> list[Handle]:
        """Take memory of a GPU in steps, until all but `left` bytes of it are somebody else's."""
        info, held = self.memory(gpu), []
        mine = info.total - info.reserved - left - self.on_loop(lambda: self.agent.node.used(self.gpus[gpu]))
        while mine > 0:
            step = min(mine, MIB)
            held.append(self._take_when_free(gpu, step))
            mine -= step
        return held

    def take_what_is_free(self, gpu: int) -> Handle:
        """Take all that is free of a GPU just now."""
        while True:
            with suppress(OutOfMemory):  # somebody was quicker
                return self.take(gpu, self.memory(gpu).free)

    def _take_when_free(self, gpu: int, size: int) -> Handle:
        def taken() -> Handle | None:
            with suppress(OutOfMemory):  # not yet, or the agent was quicker
                return self.take(gpu, size)
            return None

        handle = until(taken, saying=f"{size} bytes are free on GPU {gpu}")
        assert handle is not None
        return handle

    def memory(self, gpu: int) -> MemoryInfo:
        """What the driver shows of a GPU by number (-1: host memory)."""
        return self.observer.memory()[HOST if gpu < 0 else self.gpus[gpu]]

    def lent(self, gpu: int) -> int:
        """Bytes lent from a GPU by number (-1: host memory) by the ledger."""
        place: Place = HOST if gpu < 0 else self.gpus[gpu]
        return self.on_loop(lambda: self.agent.ledger.lent[place])

    # --- the end ---

    def close(self) -> None:
        """End everything, and see that nothing is left."""
        try:
            self.outsider.close()
            for client in self.clients:
                client.close()
            for borrower in self.borrowers:
                borrower.close()
            if self._thread.is_alive():
                self.until(lambda a: not a.sessions, saying="every session has ended")
                self._check_ledger()
            self.stop()
            until(lambda: self.observer.memory() == self.before, saying=f"{self.observer.memory()} is {self.before}")
            assert not Path(self.socket).exists()
        finally:
            self.server.stop()
            self.observer.close()
        until(lambda: not processes(str(self.folder)), saying="no process is left")

    def abandon(self) -> None:
        """End whatever hangs after a failure, which is what counts then."""
        for client in self.clients:
            client._closed = True
        for borrower in self.borrowers:
            borrower.kill()
        self.server.stop()
        self.observer.close()
        self.outsider.close()
        self._thread.join(5)

    def _check_ledger(self) -> None:
        leases, lent, ours, promised = self.on_loop(
            lambda: (
                list(self.agent.ledger.leases),
                {p: n for p, n in self.agent.ledger.lent.items() if n},
                {p: n for p, n in self.agent.node.ours.items() if n},
                {p: n for p, n in self.agent.node.promised.items() if n},
            )
        )
        assert (leases, lent, ours, promised) == ([], {}, {}, {})


class Borrower:
    """`borrower.py` in a process of its own."""

    def __init__(self, socket: str, gpu: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "borrower.py"), socket, gpu]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, do: str, *values: object) -> None:
        """Ask for something without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([do, *values]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:  # noqa: ANN401 - whatever the command answers
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the borrower has ended"
        return json.loads(line)

    def ask(self, do: str, *values: object) -> Any:  # noqa: ANN401
        """Ask and wait for the answer."""
        self.tell(do, *values)
        return self.hear()

    def stop(self) -> None:
        """Suspend the process, and wait until it is."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().split()[2] == "T")

    def go_on(self) -> None:
        """Undo `stop`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()

    def close(self) -> None:
        """End it in good order."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            assert self.process.wait(20) == 0, "the borrower failed at its end"
        self.kill()


def processes(naming: str) -> list[int]:
    """Processes whose command line names something."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if naming in (entry / "cmdline").read_text(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
    return found


@contextmanager
def node(folder: Path, config: SimConfig = SMALL, *pools: MemoryPool) -> Iterator[Node]:
    """A node that is checked at its end."""
    it = Node(folder, config, *pools)
    failed = True
    try:
        yield it
        failed = False
    finally:
        if failed:
            it.abandon()
        else:
            it.close()
