"""The heart: a chunk's backing is swapped at any moment, although a borrower alone decides when a queued copy runs."""

import os
import random
import signal
import time

import pytest

from driver.conftest import Backend, peer
from driver.gates import Chunks, window
from driver.peer import pattern
from ema_core.ids import HOST, GpuId
from ema_driver.errors import ContextLost
from ema_driver.protocol import Copy, MemoryDriver, Wait, Write

COUNT, SLOTS, SIZE = 6, 2, 64 << 10


def _version(content: bytes, chunk: int) -> int:
    version = int.from_bytes(content[4:8], "little")
    assert content == pattern(chunk, version, SIZE)
    return version


@pytest.mark.parametrize("behaviour", ["late", "stopped", "killed"])
def test_backing_swaps_behind_queued_copies(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], behaviour: str
) -> None:
    chunks = Chunks(driver, COUNT, SIZE, gpus[1])
    for i in range(COUNT):
        driver.write(chunks.address[i], pattern(i, 0, SIZE))
    shared = driver.words(SLOTS + 1)
    at, handle = window(driver, gpus[0], SIZE * (SLOTS + 1))
    fetches, stores, side = driver.stream(gpus[0]), driver.stream(gpus[0]), driver.stream(gpus[1])
    fetch = fetches.instantiate(chunks.fetch(shared, [at + SIZE * k for k in range(SLOTS)]))
    store = stores.instantiate(chunks.store(shared, SLOTS, at + SIZE * SLOTS))
    places = (gpus[1], HOST, gpus[2], gpus[3])
    rand = random.Random(behaviour)
    steps = swaps = 0
    with peer("borrow", backend.address) as borrower:
        memory, session = driver.export(handle), driver.guest(gpus[0])
        borrower.tell(f"{COUNT} {SLOTS} {SIZE} 1", session, shared.fileno(), memory)
        os.close(memory)
        os.close(session)
        assert borrower.hear()[0] == "ready"
        borrower.link.setblocking(False)
        for _ in range(400):
            fetch.launch()
            store.launch()
        end = time.monotonic() + 2.5
        upset = end - 1.0
        while time.monotonic() < end:
            i = rand.randrange(COUNT)
            chunks.take(i)
            chunks.swap(i, rand.choice(places), side)
            chunks.open(i)
            swaps += 1
            try:
                text, _ = borrower.hear()
            except BlockingIOError:
                pass
            else:
                assert text.startswith("step") or (text == "" and behaviour == "killed"), text
                steps += bool(text)
            if behaviour != "late" and upset and time.monotonic() > upset:
                borrower.send(signal.SIGSTOP if behaviour == "stopped" else signal.SIGKILL)
                upset = 0.0
    assert steps > 5
    assert swaps > 300
    for i in range(COUNT):
        chunks.take(i)
        _version(driver.read(chunks.address[i], SIZE), i)
    for stream in (fetches, stores, side):
        stream.close()


def test_no_swap_is_seen_by_a_copy_that_waits_at_the_gate(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    chunks = Chunks(driver, 1, SIZE, gpus[1])
    driver.write(chunks.address[0], pattern(0, 1, SIZE))
    shared = driver.words(1)
    at, _ = window(driver, gpus[0], SIZE)
    stream, side = driver.stream(gpus[0]), driver.stream(gpus[1])
    chunks.take(0)
    stream.instantiate(chunks.fetch(shared, [at])).launch()
    for place in (HOST, gpus[2], gpus[1], HOST):
        chunks.swap(0, place, side)
        assert not stream.done()
    chunks.open(0)
    assert stream.synchronize(5)
    assert driver.read(at, SIZE) == pattern(0, 1, SIZE)


def test_without_gates_a_swap_under_a_queued_copy_costs_the_session(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId]
) -> None:
    shared = driver.words(1)
    to, _ = window(driver, gpus[0], SIZE)
    of, _ = window(driver, gpus[1], SIZE)
    stream = driver.stream(gpus[0])
    stream.enqueue([Wait(shared, 0, 1), Copy(to, of, SIZE)])
    driver.unmap([of])
    with backend.connect() as other:
        mine, _ = window(other, gpus[0], SIZE)
        others = other.stream(gpus[0])
        shared.store(0, 1)
        with pytest.raises(ContextLost):
            stream.synchronize(5)
        with pytest.raises(ContextLost):
            driver.memory()
        others.enqueue([Copy(mine, mine, SIZE)])
        assert others.synchronize(5)


def test_without_gates_a_swap_under_a_running_copy_costs_the_session(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    size = 128 << 20
    to, _ = window(driver, gpus[0], size)
    of, _ = window(driver, gpus[1], size)
    page = driver.words(1)
    stream = driver.stream(gpus[0])
    stream.enqueue([Write(page, 0, 1), Copy(to, of, size)])
    assert page.wait(0, 1, 5)
    driver.unmap([of])
    with pytest.raises(ContextLost):
        stream.synchronize(5)
