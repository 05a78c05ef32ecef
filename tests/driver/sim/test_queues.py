"""What only the simulation promises of queued work: it can be dropped, links are shared fairly, a fault is certain."""

import pytest

from driver.gates import window
from ema_driver.errors import ContextLost
from ema_driver.protocol import Copy, Wait, Write
from ema_driver.sim import SimDriver

MIB = 1 << 20


def test_two_streams_share_a_link_fairly(driver: SimDriver) -> None:
    first, second = (device.id for device in driver.devices()[:2])
    size = 16 * MIB
    of, _ = window(driver, second, size)
    to, _ = window(driver, first, size)
    page = driver.words(4)
    greedy, modest = driver.stream(first), driver.stream(first)
    greedy.enqueue([Wait(page, 0, 1), *[Copy(to, of, size)] * 8, Write(page, 1, 1)])
    modest.enqueue([Wait(page, 0, 1), *[Copy(to, of, MIB // 2)] * 4, Write(page, 2, 1)])
    page.store(0, 1)
    assert page.wait(2, 1, 5)
    assert page.load(1) == 0
    assert greedy.synchronize(20)


def test_a_closed_stream_drops_what_is_queued(driver: SimDriver) -> None:
    gpu = driver.devices()[0].id
    page = driver.words(4)
    stream = driver.stream(gpu)
    stream.enqueue([Wait(page, 0, 1), Write(page, 1, 1)])
    stream.close()
    page.store(0, 1)
    other = driver.stream(gpu)
    other.enqueue([Write(page, 2, 1)])
    assert other.synchronize(5)
    assert page.load(1) == 0


def test_without_gates_a_swap_under_a_running_copy_costs_the_session(driver: SimDriver) -> None:
    first, second = (device.id for device in driver.devices()[:2])
    size = 32 * MIB
    to, _ = window(driver, first, size)
    of, _ = window(driver, second, size)
    page = driver.words(1)
    stream = driver.stream(first)
    stream.enqueue([Write(page, 0, 1), Copy(to, of, size)])
    assert page.wait(0, 1, 5)
    driver.unmap([of])
    with pytest.raises(ContextLost):
        stream.synchronize(5)


def test_a_stream_can_be_closed_in_the_middle_of_its_operations(driver: SimDriver) -> None:
    page = driver.words(4)
    for _ in range(5):
        stream = driver.stream(driver.devices()[0].id)
        stream.enqueue([Write(page, 1, 1), *(Write(page, 0, i) for i in range(30_000))])
        assert page.wait(1, 1, 5)
        stream.close()
        reached = page.load(0)
        assert not page.wait(0, 29_999, 0.01)
        assert page.load(0) == reached
        page.fill([0, 1], 0)
