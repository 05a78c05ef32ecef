"""Copies that are queued while nothing is mapped at their address: right, or refused with nothing queued."""

from collections.abc import Callable

import pytest

from driver.gates import window
from driver.peer import pattern
from ema_core.ids import HOST, GpuId
from ema_driver.errors import NotMapped
from ema_driver.protocol import Copy, MemoryDriver, Op, Wait

COPIES = [1, 100]
"""In one program: a driver may make few ready in another way than many."""


@pytest.mark.parametrize("copies", COPIES)
def test_launched_in_the_middle_of_a_swap(driver: MemoryDriver, gpus: list[GpuId], unit: int, copies: int) -> None:
    at, handle = window(driver, gpus[0], unit)
    to, _ = window(driver, gpus[0], unit)
    page, stream = driver.words(4), driver.stream(gpus[0])
    gate = Wait(page, 0, 1)
    graph = stream.instantiate([gate, *[Copy(to, at, unit)] * copies])
    for version, place in enumerate([HOST, gpus[0], HOST]):
        page.store(0, 0)
        driver.unmap([at])
        driver.release([handle])
        launched = _queued(graph.launch)
        handle = driver.create(place, unit)
        driver.map([(at, handle)])
        driver.write(at, pattern(version, 1, unit))
        if not launched:
            assert stream.done(), "nothing was queued"
            graph.launch()
        page.store(0, 1)
        assert stream.synchronize(10)
        assert driver.read(to, unit) == pattern(version, 1, unit)


def _queued(queue: Callable[[], object]) -> bool:
    try:
        queue()
    except NotMapped:
        return False
    return True


@pytest.mark.parametrize("copies", COPIES)
def test_made_in_the_middle_of_a_swap(driver: MemoryDriver, gpus: list[GpuId], unit: int, copies: int) -> None:
    at, handle = window(driver, gpus[0], unit)
    to, _ = window(driver, gpus[0], unit)
    page, stream = driver.words(4), driver.stream(gpus[0])
    ops: list[Op] = [Wait(page, 0, 1), *[Copy(to, at, unit)] * copies]
    driver.unmap([at])
    driver.release([handle])
    ways: list[Callable[[], object]] = [lambda: stream.enqueue(ops), lambda: stream.instantiate(ops).launch()]
    left = [way for way in ways if not _queued(way)]
    assert len(left) < 2 or stream.done(), "nothing was queued"
    handle = driver.create(HOST, unit)
    driver.map([(at, handle)])
    driver.write(at, pattern(7, 1, unit))
    for way in left:
        way()
    page.store(0, 1)
    assert stream.synchronize(10)
    assert driver.read(to, unit) == pattern(7, 1, unit)
