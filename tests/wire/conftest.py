"""A node for hostile clients, and a well-behaved one that must not notice them."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import ema
from ema_core.ids import HOST, GpuId, Place
from ema_driver.protocol import MemoryInfo
from nodes import Node, node, pattern, sim, until
from wire.raw import Raw


class Neighbour:
    """A client that runs a program all along and checks every byte of it."""

    def __init__(self, pool: ema.Pool) -> None:
        self.pool = pool
        self.steps = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            size, chunks = self.pool.granularity, 6
            region = self.pool.region(chunks * self.pool.chunk)
            wanted = [pattern(i, size) for i in range(chunks)]
            for i, data in enumerate(wanted):
                region.store(data, at=i * self.pool.chunk)
            window = self.pool.window(2, size)
            program = self.pool.program([region.step(window[i % 2], i * self.pool.chunk) for i in range(chunks)])
            program.start()
            while not self._stop.is_set():
                program.start()
                for i, data in enumerate(wanted):
                    slot = window[i % 2]
                    assert bytes(slot.wait(5.0) or b"") == data, f"step {self.steps}, piece {i}"
                    slot.release()
                self.steps += 1
                self._stop.wait(0.002)
        except BaseException as error:  # noqa: BLE001 - raised again by `end`
            self.error = error

    def end(self) -> None:
        seen = self.steps
        until(lambda: self.steps > seen + 1 or self.error, saying="the neighbour goes on")
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@dataclass
class Target:
    """What is attacked."""

    node: Node
    gpu: GpuId
    """The attackers' own GPU."""
    troubles: list[dict[str, Any]] = field(default_factory=list)
    """What the agent's loop did not expect."""

    def raw(self) -> Raw:
        return Raw(self.node.socket)

    def calm(self, sessions: int = 1) -> None:
        """Nobody but the neighbour is left."""
        self.node.until(lambda a: len(a.sessions) <= sessions or self.troubles, saying="the attackers' sessions ended")
        assert self.troubles == []


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config) as it:
        target = Target(it, it.gpus[1])
        it.on_loop(lambda: it.loop.set_exception_handler(lambda _, context: target.troubles.append(context)))
        yield target


@pytest.fixture(autouse=True)
def nobody_notices(request: pytest.FixtureRequest) -> Iterator[None]:
    """In every test with a target: the neighbour's bytes stay right, the agent expected everything, nothing is left."""
    if "target" not in request.fixturenames:
        yield
        return
    target: Target = request.getfixturevalue("target")
    target.calm(0)
    before = target.node.observer.memory()
    neighbour = Neighbour(target.node.connect(0, "neighbour"))
    yield
    neighbour.end()
    target.calm()
    neighbour.pool.close()
    target.calm(0)
    target.node.until(lambda a: not a.ledger.leases, saying="no lease is left")
    assert target.troubles == []
    until(lambda: as_before(target, before), saying="the GPUs' free bytes are as before")


def as_before(target: Target, before: Mapping[Place, MemoryInfo]) -> bool:
    """Free bytes are as before, but for host memory that the agent keeps for later."""
    spare = target.node.on_loop(lambda: target.node.agent.backing.stock.spare_bytes)
    now = target.node.observer.memory()
    return all(now[p].used - (spare if p == HOST else 0) <= m.used for p, m in before.items())
