"""Random use and misuse by several sessions, faults in their midst: the device process lives, and nothing leaks."""

import os
import random
from collections.abc import Callable

import msgspec
import pytest

from driver.sim.conftest import SMALL
from ema_core.ids import HOST, GpuId
from ema_driver.errors import ContextLost, DriverError
from ema_driver.protocol import Address, Copy, Graph, Op, Stream, Wait, Write
from ema_driver.sim import SimConfig, SimDriver, SimHandle, SimServer, faults

SIZES = (4096, 65536, 1 << 20)
FAULTS: tuple[faults.Fault, ...] = (
    faults.LostGpu(gpu=1),
    faults.RemovedGpu(gpu=2),
    faults.HungLink(source=0, target=1),
    faults.SlowLink(source=-1, target=0, factor=50),
    faults.LyingPair(source=1, target=0, how="corrupt"),
    faults.StuckMemory(place=0),
    faults.RefusedMemory(place=-1, creates=1),
    faults.Xid(gpu=0, code=13),
)


class Anybody:
    """A session that does anything at random."""

    def __init__(self, driver: SimDriver, rand: random.Random, gpus: list[GpuId]) -> None:
        self.driver, self.rand, self.gpus = driver, rand, gpus
        self.handles: list[SimHandle] = []
        self.ranges: list[Address] = []
        self.mapped: list[tuple[Address, int]] = []
        self.streams: list[Stream] = []
        self.graphs: list[Graph] = []
        self.page = driver.words(16)

    def step(self) -> None:
        often = [self.map, self.queue, self.store]
        rarely = [self.create, self.unmap, self.release, self.share, self.open, self.close, self.launch, self.look]
        self.rand.choice([*often, *often, *rarely])()

    def create(self) -> None:
        self.handles.append(self.driver.create(self.rand.choice([*self.gpus, HOST]), self.rand.choice(SIZES)))

    def map(self) -> None:
        if self.handles:
            handle = self.rand.choice(self.handles)
            address = self.driver.reserve(handle.size)
            self.driver.map([(address, handle)])
            self.mapped.append((address, handle.size))

    def unmap(self) -> None:
        if self.mapped:
            self.driver.unmap([self.mapped.pop(self.rand.randrange(len(self.mapped)))[0]])

    def release(self) -> None:
        if self.handles:
            self.driver.release([self.handles.pop(self.rand.randrange(len(self.handles)))])

    def share(self) -> None:
        if self.handles:
            handle = self.rand.choice(self.handles)
            fd = self.driver.export(handle)
            try:
                self.handles.append(self.driver.adopt(fd, handle.size))
            finally:
                os.close(fd)

    def open(self) -> None:
        self.streams.append(self.driver.stream(self.rand.choice(self.gpus)))
        self.graphs.append(self.streams[-1].instantiate(self.ops()))

    def close(self) -> None:
        if self.streams:
            self.streams.pop(self.rand.randrange(len(self.streams))).close()

    def ops(self) -> list[Op]:
        ops: list[Op] = []
        for _ in range(self.rand.randrange(1, 80)):
            ops += [Write(self.page, self.rand.randrange(3), self.rand.randrange(2)), Wait(self.page, 9, 0)]
            if len(self.mapped) > 1:
                (to, room), (of, there) = self.rand.sample(self.mapped, 2)
                size = min(room, there) + (4096 if self.rand.random() < 0.002 else 0)
                ops.append(Copy(to, of, size))
        if self.rand.random() < 0.3:
            ops.append(Wait(self.page, self.rand.randrange(3), 1))
        return ops

    def queue(self) -> None:
        if self.streams:
            self.rand.choice(self.streams).enqueue(self.ops())

    def launch(self) -> None:
        if self.graphs:
            self.rand.choice(self.graphs).launch()

    def store(self) -> None:
        self.page.store(self.rand.randrange(3), self.rand.randrange(2))

    def look(self) -> None:
        if self.streams:
            self.rand.choice(self.streams).synchronize(self.rand.choice([0, 0.001]))


@pytest.mark.parametrize("seed", range(4))
def test_nothing_brings_the_device_process_down(serve: Callable[[SimConfig], SimServer], seed: int) -> None:
    rand = random.Random(seed)
    config = msgspec.structs.replace(SMALL, nvlink_rate=10**9 if seed % 2 else 10**11, link_delays=seed != 3)
    server = serve(config)
    with SimDriver.connect(server.socket) as watcher:
        gpus = [device.id for device in watcher.devices()]
        before = watcher.memory()
        sessions = [Anybody(SimDriver.connect(server.socket), rand, gpus) for _ in range(4)]
        lost = 0
        for _ in range(1500):
            if rand.random() < 0.01:
                fault = rand.choice(FAULTS)
                (watcher.inject if rand.random() < 0.5 else watcher.clear)(fault)
            i = rand.randrange(len(sessions))
            leaves = rand.random() < 0.002
            try:
                sessions[i].step()
            except ContextLost:
                leaves = True
            except DriverError:
                continue
            if leaves:
                lost += 1
                sessions[i].driver.close()
                sessions[i] = Anybody(SimDriver.connect(server.socket), rand, gpus)
        for session in sessions:
            session.driver.close()
        for fault in FAULTS:
            watcher.clear(fault)
        assert watcher.memory() == before
        assert lost
