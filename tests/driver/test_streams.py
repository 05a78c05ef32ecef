"""Streams: order, and waits that need no CPU of whoever queued them."""

import os
import signal
import threading

import pytest

from driver.conftest import Backend, peer
from driver.gates import window
from driver.peer import pattern
from ema_core.ids import HOST, GpuId, Place
from ema_driver.errors import InvalidUse
from ema_driver.protocol import Copy, MemoryDriver, Stream, Wait, Write


def test_operations_run_in_order(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    a, _ = window(driver, gpus[0], unit)
    b, _ = window(driver, gpus[1], unit)
    c, _ = window(driver, HOST, unit)
    page = driver.words(8)
    driver.write(a, pattern(1, 1, unit))
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(page, 0, 1), Copy(b, a, unit), Write(page, 1, 5), Copy(c, b, unit), Write(page, 1, 6)])
    assert not stream.done()
    assert not stream.synchronize(0.05)
    page.store(0, 1)
    assert page.wait(1, 6, 5)
    assert driver.read(c, unit) == pattern(1, 1, unit)
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


def test_a_graph_uses_what_is_mapped_when_it_runs(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    at, handle = window(driver, gpus[3], unit)
    to, _ = window(driver, gpus[0], unit)
    stream = driver.stream(gpus[0])
    graph = stream.instantiate([Copy(to, at, unit)])
    for version, place in enumerate([gpus[1], HOST, gpus[2], HOST]):
        driver.unmap([at])
        driver.release([handle])
        handle = driver.create(place, unit)
        driver.map([(at, handle)])
        driver.write(at, pattern(0, version, unit))
        graph.launch()
        assert stream.synchronize(5)
        assert driver.read(to, unit) == pattern(0, version, unit)
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


def test_silent_borrowers_do_not_stall_the_next(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    page = driver.words(64)
    a, _ = window(driver, gpus[0], unit)
    b, _ = window(driver, gpus[1], unit)
    silent = [driver.stream(gpus[i % len(gpus)]) for i in range(backend.gated)]
    for i, stream in enumerate(silent):
        graph = stream.instantiate([Wait(page, i, 1), Copy(a, b, unit)])
        graph.launch()
        graph.launch()
    for number in range(60):
        served = driver.stream(gpus[0])
        served.enqueue([Copy(a, b, unit), Write(page, 60, number + 1)])
        assert served.synchronize(2), f"stream {number} beside {len(silent)} silent ones"
        assert page.load(60) == number + 1
        served.close()
    assert not any(stream.done() for stream in silent)
    page.fill(range(len(silent)), 1)
    assert all(stream.synchronize(5) for stream in silent)


def test_silent_borrowers_of_host_memory_do_not_keep_the_next_from_its_program(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    page = driver.words(64)
    to, _ = window(driver, gpus[0], unit)
    of, _ = window(driver, HOST, unit)
    silent: list[Stream] = []

    def borrow() -> None:
        for i in range(backend.gated):
            stream = driver.stream(gpus[0])
            graph = stream.instantiate([Wait(page, i, 1), Copy(to, of, unit), Write(page, 50, 1)])
            graph.launch()
            graph.launch()
            silent.append(stream)
        served = driver.stream(gpus[0])
        served.instantiate([Copy(to, of, unit), Write(page, 60, 1)]).launch()
        assert served.synchronize(5)

    thread = threading.Thread(target=borrow)
    thread.start()
    thread.join(15)
    silenced, stuck = len(silent), thread.is_alive()
    ran = page.load(50) == 1
    page.fill(range(backend.gated), 1)  # whatever it is stuck in goes on now
    thread.join(15)
    assert not stuck, f"a program could not be made or run beside {silenced} silent borrowers"
    assert not ran
    assert page.load(60) == 1
    assert all(stream.synchronize(5) for stream in silent)


def test_no_call_waits_behind_a_queue(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    page, spare = driver.words(4), driver.words(4)
    at, handle = window(driver, gpus[0], unit)
    blocked = driver.stream(gpus[0])
    queued = blocked.instantiate([Wait(page, 0, 1), Copy(at, at + unit // 2, unit // 2)])
    queued.launch()
    finished: list[str] = []

    def use() -> None:
        for place in (gpus[0], HOST):
            other, memory = window(driver, place, unit)
            driver.write(other, pattern(1, 1, unit))
            driver.read(other, unit)
            fd = driver.export(memory)
            driver.release([driver.adopt(fd, unit)])
            os.close(fd)
            driver.unmap([other])
            driver.release([memory])
            driver.unreserve([other])
            finished.append(place)
        stream = driver.stream(gpus[0])
        graph = stream.instantiate([Write(spare, 0, 1)])
        graph.launch()
        assert stream.synchronize(5)
        graph.close()
        stream.close()
        spare.close()
        driver.memory()
        finished.append("streams and pages")
        driver.unmap([at])
        driver.map([(at, handle)])
        finished.append("the memory of the queued copy itself")

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert not blocked.done()
    page.store(0, 1)
    thread.join(10)
    assert blocked.synchronize(5)
    assert finished[2:] == ["streams and pages", "the memory of the queued copy itself"]


def test_what_is_closed_too_early_costs_nobody_anything(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    with backend.connect() as other:
        page = other.words(4)
        at, _ = window(other, gpus[0], unit)
        early = [other.stream(gpus[0]) for _ in range(3)]
        for stream in early:
            stream.enqueue([Wait(page, 0, 1), Copy(at, at + unit // 2, unit // 2), Wait(page, 0, 2), Write(page, 1, 1)])
        early[0].close()
        early[0].close()
        page.close()
        with pytest.raises(InvalidUse):
            early[0].enqueue([Copy(at, at + unit // 2, unit // 2)])
        served = other.stream(gpus[0])
        served.enqueue([Copy(at, at + unit // 2, unit // 2)])
        assert served.synchronize(5)
    own, _ = window(driver, gpus[0], unit)
    stream = driver.stream(gpus[0])
    stream.enqueue([Copy(own, own + unit // 2, unit // 2)])
    assert stream.synchronize(5)


def test_copies_name_mapped_memory_of_real_gpus(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    at, _ = window(driver, gpus[0], unit)
    with pytest.raises(InvalidUse):
        driver.stream(GpuId(Place("GPU-of-nobody")))
    with pytest.raises(InvalidUse):
        driver.read(at + unit - 1, 2)


def test_a_stopped_process_has_its_queued_work_done(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    page = driver.words(16)
    at, handle = window(driver, gpus[0], unit)
    with peer("queue", backend) as other:
        memory = driver.export(handle)
        other.tell(str(unit), page.fileno(), memory)
        os.close(memory)
        assert other.hear()[0] == "queued"
        other.send(signal.SIGSTOP)
        page.store(0, 1)
        assert page.wait(1, 1, 5)
        assert driver.read(at, unit) == pattern(3, 1, unit)


def test_a_killed_process_has_its_queued_work_dropped(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    page = driver.words(16)
    at, handle = window(driver, gpus[0], unit)
    with peer("queue", backend) as other:
        memory = driver.export(handle)
        other.tell(str(unit), page.fileno(), memory)
        os.close(memory)
        assert other.hear()[0] == "queued"
        other.send(signal.SIGKILL)
        other.process.wait()
        driver.memory()
        page.store(0, 1)
        assert not page.wait(1, 1, 0.05)
        assert driver.read(at, unit) == bytes(unit)


def test_a_session_serves_threads_at_once(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            gpu = gpus[number % len(gpus)]
            stream, page = driver.stream(gpu), driver.words(4)
            for _ in range(20):
                at, handle = window(driver, gpu, unit)
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
