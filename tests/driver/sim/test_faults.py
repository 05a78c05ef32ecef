"""Every fault knob does what a sick device does, and no more."""

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from driver.gates import window
from driver.sim.conftest import MIB, SMALL
from ema_core.ids import HOST, GpuId
from ema_driver.errors import DeviceLost, DriverError, InvalidUse, OutOfMemory
from ema_driver.protocol import Copy, HealthKind, Wait, Write
from ema_driver.sim import SimConfig, SimDriver, SimServer, faults


def ids(driver: SimDriver) -> list[GpuId]:
    return [device.id for device in driver.devices()]


def test_a_lost_gpu_ends_only_the_streams_that_touch_it(driver: SimDriver) -> None:
    gpus = ids(driver)
    page = driver.words(8)
    at = [window(driver, gpu, MIB)[0] for gpu in gpus]
    waits, others, own = driver.stream(gpus[0]), driver.stream(gpus[0]), driver.stream(gpus[1])
    own.enqueue([Wait(page, 1, 1)])
    waits.enqueue([Wait(page, 0, 1), Copy(at[0], at[1], MIB), Write(page, 2, 1)])
    driver.inject(faults.LostGpu(gpu=1))
    assert [(e.gpu, e.kind) for e in driver.health()] == [(gpus[1], HealthKind.LOST)]
    assert gpus[1] not in driver.memory()
    assert set(driver.memory()) == {gpus[0], gpus[2], HOST}
    with pytest.raises(DeviceLost):
        own.synchronize(5)
    page.store(0, 1)
    with pytest.raises(DeviceLost):
        waits.synchronize(5)
    assert page.load(2) == 0
    others.enqueue([Copy(at[0], at[2], MIB), Write(page, 2, 2)])
    assert others.synchronize(5)
    with pytest.raises(DeviceLost):
        driver.create(gpus[1], MIB)
    driver.clear(faults.LostGpu(gpu=1))
    assert [(e.gpu, e.kind) for e in driver.health()] == [(gpus[1], HealthKind.RECOVERED)]
    assert driver.memory()[gpus[1]].used == 0
    others.enqueue([Copy(at[0], at[1], MIB)])
    with pytest.raises(DeviceLost):
        others.synchronize(5)
    driver.unmap([at[1]])
    window(driver, gpus[1], MIB)


def test_a_gpu_lost_under_a_copy_ends_the_stream(driver: SimDriver) -> None:
    gpus = ids(driver)
    to, of = window(driver, gpus[0], 32 * MIB)[0], window(driver, gpus[1], 32 * MIB)[0]
    page = driver.words(1)
    stream = driver.stream(gpus[0])
    stream.enqueue([Write(page, 0, 1), Copy(to, of, 32 * MIB), Write(page, 0, 2)])
    assert page.wait(0, 1, 5)
    driver.inject(faults.LostGpu(gpu=1))
    with pytest.raises(DeviceLost):
        stream.synchronize(5)
    assert page.load(0) == 1


def test_a_removed_gpu_is_noticed_only_by_counting(driver: SimDriver) -> None:
    gpus = ids(driver)
    driver.inject(faults.RemovedGpu(gpu=0))
    assert ids(driver) == gpus[1:]
    assert [device.index for device in driver.devices()] == [0, 1]
    assert driver.health() == []
    assert all(gpus[0] not in {link.source, link.target} for link in driver.links())


def test_an_xid_comes_and_clears(driver: SimDriver) -> None:
    gpu = ids(driver)[2]
    driver.inject(faults.Xid(gpu=2, code=63))
    driver.clear(faults.Xid(gpu=2, code=63))
    events = driver.health()
    assert [(e.gpu, e.kind, e.code) for e in events] == [(gpu, HealthKind.XID, 63), (gpu, HealthKind.RECOVERED, 63)]
    assert driver.health() == []


@pytest.mark.parametrize("how", ["drop", "corrupt"])
def test_a_lying_pair_claims_a_path_and_spoils_what_goes_over_it(driver: SimDriver, how: str) -> None:
    gpus = ids(driver)
    fault = msgspec.convert({"kind": "lying-pair", "source": 1, "target": 0, "how": how}, faults.Fault)
    a, b = window(driver, gpus[0], MIB)[0], window(driver, gpus[1], MIB)[0]
    driver.write(b, b"\x11" * MIB)
    driver.inject(fault)
    assert any((link.source, link.target) == (gpus[1], gpus[0]) for link in driver.links())
    stream = driver.stream(gpus[0])
    stream.enqueue([Copy(a, b, MIB)])
    assert stream.synchronize(5)
    assert driver.read(a, MIB) != b"\x11" * MIB
    driver.clear(fault)
    stream.enqueue([Copy(a, b, MIB)])
    assert stream.synchronize(5)
    assert driver.read(a, MIB) == b"\x11" * MIB


def test_a_slow_link_is_slow_one_way(driver: SimDriver) -> None:
    gpus = ids(driver)
    size = 4 * MIB  # about 1 ms
    a, b = window(driver, gpus[0], size)[0], window(driver, gpus[1], size)[0]
    stream = driver.stream(gpus[0])
    stream.enqueue([Copy(a, b, size), Copy(b, a, size)])
    assert stream.synchronize(5)
    driver.inject(faults.SlowLink(source=1, target=0, factor=100))
    began = time.monotonic()
    stream.enqueue([Copy(b, a, size)])
    assert stream.synchronize(5)
    forth = time.monotonic() - began
    stream.enqueue([Copy(a, b, size)])
    assert stream.synchronize(5)
    assert time.monotonic() - began - forth > 0.09 > forth


def test_memory_is_refused_as_often_as_asked(driver: SimDriver) -> None:
    gpu = ids(driver)[0]
    driver.inject(faults.RefusedMemory(place=0, creates=2))
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            driver.create(gpu, MIB)
    driver.create(gpu, MIB)
    driver.inject(faults.RefusedMemory(place=-1))
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            driver.create(HOST, MIB)
    driver.clear(faults.RefusedMemory(place=-1))
    driver.create(HOST, MIB)


def test_mapping_is_refused_after_as_many_calls_as_asked(driver: SimDriver) -> None:
    gpu = ids(driver)[0]
    at, here, host = driver.reserve(MIB), driver.create(gpu, MIB), driver.create(HOST, MIB)
    driver.inject(faults.RefusedMapping(place=-1, maps=2, after=1))
    driver.map([(at, host)])
    driver.unmap([at])
    for _ in range(2):
        with pytest.raises(DriverError, match="cannot be mapped"):
            driver.map([(at, host)])
    driver.map([(at, host)])
    driver.unmap([at])
    driver.inject(faults.RefusedMapping(place=0))
    for _ in range(3):
        with pytest.raises(DriverError, match="cannot be mapped"):
            driver.map([(at, here)])
    driver.map([(at, host)])
    driver.unmap([at])
    driver.clear(faults.RefusedMapping(place=0))
    driver.map([(at, here)])


def test_stuck_memory_stays_taken_after_everybody_gave_it_up(driver: SimDriver) -> None:
    gpu = ids(driver)[1]
    driver.inject(faults.StuckMemory(place=1))
    driver.release([driver.create(gpu, MIB)])
    assert driver.memory()[gpu].used == MIB
    driver.clear(faults.StuckMemory(place=1))
    assert driver.memory()[gpu].used == 0


def test_a_hung_link_holds_its_copies_only(driver: SimDriver) -> None:
    gpus = ids(driver)
    a, b = window(driver, gpus[0], MIB)[0], window(driver, gpus[1], MIB)[0]
    hung, fine = driver.stream(gpus[0]), driver.stream(gpus[0])
    driver.inject(faults.HungLink(source=1, target=0))
    hung.enqueue([Copy(a, b, MIB)])
    fine.enqueue([Copy(b, a, MIB)])
    assert fine.synchronize(5)
    assert not hung.synchronize(0.05)
    driver.clear(faults.HungLink(source=1, target=0))
    assert hung.synchronize(5)


def test_hundreds_of_copies_behind_a_hung_link_all_go_on(driver: SimDriver) -> None:
    gpus = ids(driver)
    a, b = window(driver, gpus[0], MIB)[0], window(driver, gpus[1], MIB)[0]
    driver.inject(faults.HungLink(source=1, target=0))
    streams = [driver.stream(gpus[0]) for _ in range(500)]
    for stream in streams:
        stream.enqueue([Copy(a, b, 64)])
    assert not streams[-1].synchronize(0.01)
    driver.clear(faults.HungLink(source=1, target=0))
    assert all(stream.synchronize(5) for stream in streams)


def test_hung_queries_hold_the_caller_and_nobody_else(driver: SimDriver) -> None:
    driver.inject(faults.HungQueries(gpu=2))
    answers: list[object] = []
    caller = threading.Thread(target=lambda: answers.append(driver.memory()))
    caller.start()
    for _ in range(20):
        driver.devices()
    assert not answers
    driver.clear(faults.HungQueries(gpu=2))
    caller.join(5)
    assert len(answers) == 1


@pytest.mark.parametrize("fault", [faults.UnsupportedMemory(gpu=1), faults.NonsenseMemory(gpu=1)])
def test_memory_that_cannot_be_true_is_left_out(driver: SimDriver, fault: faults.Fault) -> None:
    gpus = ids(driver)
    driver.inject(fault)
    assert set(driver.memory()) == {gpus[0], gpus[2], HOST}
    driver.clear(fault)
    assert set(driver.memory()) == {*gpus, HOST}


def test_faults_can_be_there_from_the_start(serve: Callable[[SimConfig], SimServer]) -> None:
    config = msgspec.structs.replace(SMALL, faults=(faults.LostGpu(gpu=0), faults.UnsupportedMemory(gpu=1)))
    with SimDriver.connect(serve(config).socket) as driver:
        assert set(driver.memory()) == {ids(driver)[2], HOST}


def test_faults_name_gpus_that_exist(driver: SimDriver) -> None:
    with pytest.raises(InvalidUse, match="no GPU 3; there are 3"):
        driver.inject(faults.LostGpu(gpu=3))


def test_shuffled_enumeration_keeps_identities(serve: Callable[[SimConfig], SimServer]) -> None:
    orders, lost = set(), set()
    for seed in range(5):
        with SimDriver.connect(
            serve(msgspec.structs.replace(SMALL, shuffle_enumeration=True, seed=seed)).socket
        ) as driver:
            orders.add(tuple(ids(driver)))
            driver.inject(faults.LostGpu(gpu=1))
            lost |= {device.id for device in driver.devices()} - set(driver.memory())
    assert len(orders) > 1
    assert len({frozenset(order) for order in orders}) == 1
    with SimDriver.connect(serve(SMALL).socket) as driver:
        assert {ids(driver)[1]} == lost
