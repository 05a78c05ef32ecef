"""Streams and words: order, waits that need no CPU of whoever queued them, and who is let go when."""

import os
import signal
import threading

import pytest

from driver.conftest import MIB, Backend, peer
from driver.gates import window
from driver.peer import pattern
from ema_core.ids import HOST, GpuId, Place
from ema_driver.errors import InvalidUse
from ema_driver.protocol import Copy, MemoryDriver, Wait, Write


def test_operations_run_in_order(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    a, _ = window(driver, gpus[0], MIB)
    b, _ = window(driver, gpus[1], MIB)
    c, _ = window(driver, HOST, MIB)
    page = driver.words(8)
    driver.write(a, pattern(1, 1, MIB))
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(page, 0, 1), Copy(b, a, MIB), Write(page, 1, 5), Copy(c, b, MIB), Write(page, 1, 6)])
    assert not stream.done()
    assert not stream.synchronize(0.05)
    page.store(0, 1)
    assert page.wait(1, 6, 5)
    assert driver.read(c, MIB) == pattern(1, 1, MIB)
    assert stream.synchronize(5)
    assert stream.done()


def test_a_wait_holds_for_exactly_its_value(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(4)
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(page, 0, 3), Write(page, 1, 1)])
    for value in (1, 2, 4, 2**32 - 1):
        page.store(0, value)
        assert not stream.synchronize(0.02)
    page.store(0, 3)
    assert stream.synchronize(5)
    assert page.load(1) == 1


def test_streams_let_each_other_go(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(4)
    ping, pong = driver.stream(gpus[0]), driver.stream(gpus[1])
    ping.enqueue([op for i in range(100) for op in (Write(page, 0, i + 1), Wait(page, 1, i + 1))])
    pong.enqueue([op for i in range(100) for op in (Wait(page, 0, i + 1), Write(page, 1, i + 1))])
    assert ping.synchronize(5)
    assert pong.synchronize(5)


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


def test_a_graph_uses_what_is_mapped_when_it_runs(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    at = driver.reserve(MIB)
    to, _ = window(driver, gpus[0], MIB)
    stream = driver.stream(gpus[0])
    graph = stream.instantiate([Copy(to, at, MIB)])
    for version, place in enumerate([gpus[1], HOST, gpus[2]]):
        handle = driver.create(place, MIB)
        driver.map([(at, handle)])
        driver.write(at, pattern(0, version, MIB))
        graph.launch()
        assert stream.synchronize(5)
        assert driver.read(to, MIB) == pattern(0, version, MIB)
        driver.unmap([at])
        driver.release([handle])
    graph.close()
    graph.close()


def test_launches_and_operations_keep_their_order(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(4)
    stream = driver.stream(gpus[0])
    one, two = stream.instantiate([Write(page, 0, 1)]), stream.instantiate([Wait(page, 0, 1), Write(page, 0, 2)])
    for _ in range(200):
        one.launch()
        two.launch()
    stream.enqueue([Wait(page, 0, 2), Write(page, 1, 7)])
    assert stream.synchronize(5)
    assert (page.load(0), page.load(1)) == (2, 7)


def test_forty_silent_borrowers_do_not_stall_the_next(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(64)
    a, _ = window(driver, gpus[0], MIB)
    b, _ = window(driver, gpus[1], MIB)
    silent = [driver.stream(gpus[i % len(gpus)]) for i in range(40)]
    for i, stream in enumerate(silent):
        graph = stream.instantiate([Wait(page, i, 1), Copy(a, b, MIB)])
        graph.launch()
        graph.launch()
    served = driver.stream(gpus[0])
    served.enqueue([Copy(a, b, MIB), Write(page, 60, 1)])
    assert served.synchronize(2)
    assert not any(stream.done() for stream in silent)
    for stream in silent:
        stream.close()


def test_two_streams_share_a_link_fairly(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    size = 32 * MIB
    of, _ = window(driver, gpus[1], size)
    to, _ = window(driver, gpus[0], size)
    page = driver.words(4)
    greedy, modest = driver.stream(gpus[0]), driver.stream(gpus[0])
    greedy.enqueue([Wait(page, 0, 1), *[Copy(to, of, size)] * 40, Write(page, 1, 1)])
    modest.enqueue([Wait(page, 0, 1), *[Copy(to, of, MIB)] * 4, Write(page, 2, 1)])
    page.store(0, 1)
    assert page.wait(2, 1, 5)
    assert page.load(1) == 0
    assert greedy.synchronize(20)


def test_a_stopped_process_has_its_queued_work_done(backend: Backend, driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(16)
    at, handle = window(driver, gpus[0], MIB)
    with peer("queue", backend.address) as other:
        memory = driver.export(handle)
        other.tell(str(MIB), page.fileno(), memory)
        os.close(memory)
        assert other.hear()[0] == "queued"
        other.send(signal.SIGSTOP)
        page.store(0, 1)
        assert page.wait(1, 1, 5)
        assert driver.read(at, MIB) == pattern(3, 1, MIB)


def test_a_killed_process_has_its_queued_work_dropped(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId]
) -> None:
    page = driver.words(16)
    at, handle = window(driver, gpus[0], MIB)
    with peer("queue", backend.address) as other:
        memory = driver.export(handle)
        other.tell(str(MIB), page.fileno(), memory)
        os.close(memory)
        assert other.hear()[0] == "queued"
        other.send(signal.SIGKILL)
        other.process.wait()
        driver.memory()
        page.store(0, 1)
        assert not page.wait(1, 1, 0.05)
        assert driver.read(at, MIB) == bytes(MIB)


def test_a_plain_store_of_another_process_releases_a_stream(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId]
) -> None:
    page = driver.words(16)
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(page, 3, 77)])
    with peer("store", backend.address) as other:
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


def test_a_session_serves_threads_at_once(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            gpu = gpus[number % len(gpus)]
            stream, page = driver.stream(gpu), driver.words(4)
            for _ in range(20):
                at, handle = window(driver, gpu, MIB)
                driver.write(at, pattern(number, 1, 4096))
                stream.enqueue([Copy(at + 4096, at, 4096), Write(page, 0, 1)])
                assert stream.synchronize(5)
                assert driver.read(at + 4096, 4096) == pattern(number, 1, 4096)
                driver.unmap([at])
                driver.release([handle])
        except BaseException as error:  # noqa: BLE001  (shown by the assertion below)
            errors.append(error)

    blocked = driver.stream(gpus[0])
    lock = driver.words(1)
    blocked.enqueue([Wait(lock, 0, 1)])
    sleeper = threading.Thread(target=blocked.synchronize, args=(10,))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    sleeper.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert sleeper.is_alive()
    lock.store(0, 1)
    sleeper.join(5)
    assert not sleeper.is_alive()


def test_a_closed_stream_drops_what_is_queued(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(4)
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(page, 0, 1), Write(page, 1, 1)])
    stream.close()
    stream.close()
    page.store(0, 1)
    other = driver.stream(gpus[0])
    other.enqueue([Write(page, 2, 1)])
    assert other.synchronize(5)
    assert page.load(1) == 0
    with pytest.raises(InvalidUse):
        stream.enqueue([Write(page, 1, 1)])
    with pytest.raises(InvalidUse):
        driver.stream(GpuId(Place("GPU-of-nobody")))


def test_a_stream_can_be_closed_in_the_middle_of_its_operations(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    page = driver.words(4)
    for _ in range(5):
        stream = driver.stream(gpus[0])
        stream.enqueue([Write(page, 1, 1), *(Write(page, 0, i) for i in range(30_000))])
        assert page.wait(1, 1, 5)
        stream.close()
        reached = page.load(0)
        assert not page.wait(0, 29_999, 0.01)
        assert page.load(0) == reached
        page.fill([0, 1], 0)


def test_what_is_closed_or_of_another_session_cannot_be_used_and_costs_nothing(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId]
) -> None:
    page, stream = driver.words(4), driver.stream(gpus[0])
    with backend.connect() as other:
        foreign = other.words(4)
        with pytest.raises(InvalidUse):
            stream.enqueue([Write(foreign, 0, 1)])
    graph = stream.instantiate([Write(page, 0, 1)])
    graph.close()
    with pytest.raises(InvalidUse):
        graph.launch()
    page.close()
    with pytest.raises(InvalidUse):
        stream.enqueue([Write(page, 0, 1)])
    assert stream.synchronize(5)
