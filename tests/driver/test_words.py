"""Words: what is shared between processes, GPUs and threads, and who is let go when."""

import os
import threading

import pytest

from driver.conftest import Backend, peer
from ema_core.ids import GpuId
from ema_driver.errors import InvalidUse
from ema_driver.protocol import MemoryDriver, Wait, Write


def test_fill_lets_many_go_at_once(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(8)
    streams = [driver.stream(gpus[0]) for _ in range(8)]
    for i, stream in enumerate(streams):
        stream.enqueue([Wait(page, i, 9)])
    page.fill(range(4), 9)
    assert all(stream.synchronize(5) for stream in streams[:4])
    assert not any(stream.done() for stream in streams[4:])
    page.fill(range(4, 8), 9)
    assert all(stream.synchronize(5) for stream in streams)


def test_a_plain_store_of_another_process_releases_a_stream(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId]
) -> None:
    page = driver.words(16)
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(page, 3, 77)])
    with peer("store", backend) as other:
        other.tell("3 77", page.fileno())
        other.hear()
        other.tell("now")
        other.hear()
        assert page.load(3) == 77
        assert stream.synchronize(0.5)


def test_words_are_shared_between_sessions(backend: Backend, driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(16)
    with backend.connect() as other:
        same = other.adopt_words(page.fileno(), 16)
        assert same.count >= 16
        stream = other.stream(gpus[0])
        stream.enqueue([Wait(same, 2, 1), Write(same, 3, 1)])
        page.store(2, 1)
        assert page.wait(3, 1, 5)
        assert same.load(3) == 1
        page.close()
        page.close()
        same.store(2, 0)


def test_a_page_must_be_sealed_and_large_enough(driver: MemoryDriver) -> None:
    page = driver.words(16)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.ftruncate(plain, 4096)
    try:
        with pytest.raises(InvalidUse, match="sealed"):
            driver.adopt_words(plain, 16)
        with pytest.raises(InvalidUse, match="100000"):
            driver.adopt_words(page.fileno(), 100_000)
    finally:
        os.close(plain)


@pytest.mark.parametrize(("index", "value"), [(-1, 0), (1 << 20, 0), (0, -1), (0, 2**32)])
def test_words_and_values_out_of_range_are_refused(
    driver: MemoryDriver, gpus: list[GpuId], index: int, value: int
) -> None:
    page = driver.words(16)
    stream = driver.stream(gpus[0])
    for use in (
        lambda: page.store(index, value),
        lambda: page.fill([index], value),
        lambda: page.wait(index, value, 0),
        lambda: stream.enqueue([Wait(page, index, value)]),
        lambda: stream.instantiate([Write(page, index, value)]),
    ):
        with pytest.raises(InvalidUse):
            use()


def test_a_thread_waits_for_a_word_and_is_woken_or_gives_up(driver: MemoryDriver) -> None:
    page = driver.words(4)
    assert not page.wait(0, 1, 0.02)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(page.wait(0, 1, 10)))
    thread.start()
    page.store(0, 1)
    thread.join(5)
    assert seen == [True]
