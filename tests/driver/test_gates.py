"""The heart: a chunk's backing is swapped at any moment, although a borrower alone decides when a queued copy runs."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from driver.conftest import Backend, guest_of, peer
from driver.gates import Chunks, let_pass, window
from driver.peer import pattern
from ema_core.ids import HOST, GpuId
from ema_driver.protocol import Copy, MemoryDriver

Record = Callable[[str, object], None]
COUNT, SLOTS = 6, 2
SECONDS = float(os.environ.get("EMA_GATE_SECONDS", "2.5"))
AHEAD = 2
"""Launches that may be outstanding: more would only test the length of a GPU's queue."""


def _size(driver: MemoryDriver) -> int:
    return driver.granularity(HOST)


def _version(content: bytes, chunk: int) -> int:
    version = int.from_bytes(content[4:8], "little")
    assert content == pattern(chunk, version, len(content))
    return version


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("behaviour", ["late", "stopped", "killed"])
def test_backing_swaps_behind_queued_copies(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], behaviour: str, record_property: Record
) -> None:
    size = _size(driver)
    chunks = Chunks(driver, COUNT, size, gpus[1])
    for i in range(COUNT):
        driver.write(chunks.address[i], pattern(i, 0, size))
    shared = driver.words(SLOTS + 1)
    at, handle = window(driver, gpus[0], size * (SLOTS + 1))
    fetches, stores, side = driver.stream(gpus[0]), driver.stream(gpus[0]), driver.stream(gpus[1])
    fetch = fetches.instantiate(chunks.fetch(shared, [at + size * k for k in range(SLOTS)]))
    store = stores.instantiate(chunks.store(shared, SLOTS, at + size * SLOTS))
    places = (gpus[1], HOST, gpus[2], gpus[3])
    rand = random.Random(behaviour)
    steps = stored = swaps = fetches_begun = stores_begun = 0
    takes: list[float] = []
    with peer("borrow", backend) as borrower:
        memory, session = driver.export(handle), guest_of(driver, gpus[0])
        borrower.tell(f"{gpus[0]} {COUNT} {SLOTS} {size} 1", shared.fileno(), memory, *session)
        for fd in (memory, *session):
            os.close(fd)
        assert borrower.hear()[0] == "ready"
        borrower.link.setblocking(False)
        end = time.monotonic() + SECONDS
        upset = end - 1.0
        while time.monotonic() < end:
            # Each by itself: the borrower stores now and then only, and always after a fetch.
            while fetches_begun < steps + AHEAD:
                fetch.launch()
                fetches_begun += 1
            while stores_begun < stored // COUNT + AHEAD:
                store.launch()
                stores_begun += 1
            i = rand.randrange(COUNT)
            began = time.monotonic()
            chunks.take(i)
            takes.append(time.monotonic() - began)
            chunks.swap(i, rand.choice(places), side)
            chunks.open(i)
            swaps += 1
            try:
                text, _ = borrower.hear()
            except BlockingIOError:
                pass
            else:
                assert text.startswith("step") or (text == "" and behaviour == "killed"), text
                if text:
                    steps += 1
                    stored += int(text.split()[2])
            if behaviour != "late" and upset and time.monotonic() > upset:
                borrower.send(signal.SIGSTOP if behaviour == "stopped" else signal.SIGKILL)
                upset = 0.0
    takes.sort()
    record_property("fetches and stores", f"{steps * COUNT} and {stored}")
    record_property("swaps", f"{swaps}, {chunks.reopened} reopened gates")
    quantiles = (takes[int(len(takes) * q)] * 1e3 for q in (0.5, 0.99))
    record_property("certain after", "p50 {:.3f} p99 {:.3f}".format(*quantiles) + f" max {takes[-1] * 1e3:.3f} ms")
    assert steps > 2
    assert swaps > 300
    for i in range(COUNT):
        chunks.take(i)
        _version(driver.read(chunks.address[i], size), i)
        chunks.open(i)
    assert let_pass(shared, SLOTS + 1, [fetches, stores])
    for stream in (fetches, stores, side):
        stream.close()


def test_no_swap_is_seen_by_a_copy_that_waits_at_the_gate(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    size = _size(driver)
    chunks = Chunks(driver, 1, size, gpus[1])
    driver.write(chunks.address[0], pattern(0, 1, size))
    shared = driver.words(1)
    at, _ = window(driver, gpus[0], size)
    stream, side = driver.stream(gpus[0]), driver.stream(gpus[1])
    chunks.take(0)
    stream.instantiate(chunks.fetch(shared, [at])).launch()
    for place in (HOST, gpus[2], gpus[1], HOST):
        chunks.swap(0, place, side)
        assert not stream.done()
    chunks.open(0)
    assert stream.synchronize(5)
    assert driver.read(at, size) == pattern(0, 1, size)


def test_without_gates_a_swap_under_a_queued_copy_costs_the_session_alone(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    mine, _ = window(driver, gpus[0], unit)
    stream = driver.stream(gpus[0])
    with peer("stumble", backend) as other:
        other.tell(str(unit))
        assert other.hear()[0].startswith("lost:")
        assert other.hear()[0].startswith("lost:")
        stream.enqueue([Copy(mine, mine + unit // 2, unit // 2)])
        assert stream.synchronize(5)
