"""Copies in host memory: made in the background, and never trusted when a store came after them."""

import random
import threading
import time
from collections.abc import Callable

import pytest

import ema
from ema_agent import cleaner
from ema_agent.gates import Gates
from ema_core.ids import HOST
from ema_driver.protocol import Copy
from ema_driver.sim import faults
from ema_driver.sim.streams import SimStream
from nodes import KIB, MIB, SMALL, Node, pattern, pool, until

CHUNK = 256 * KIB


def reclaimed(node: Node, gpu: int) -> None:
    until(lambda: node.lent(gpu) == 0 or node.memory(gpu).free >= 2 * MIB, saying="the lender has its headroom")


def test_a_store_under_way_is_never_forgotten(node: Node) -> None:
    driver, gpu = node.observer, node.gpus[0]
    gates = Gates(driver)
    gate = gates.new()
    handle = driver.create(gpu, CHUNK)
    address = driver.reserve(CHUNK)
    driver.map([(address, handle)])
    stream = driver.stream(gpu)
    copy = Copy(int(address), int(address), CHUNK)
    stream.enqueue(gate.around(copy, store=True))
    assert gates.clear_dirty(gate), "the store has not begun: its gate is closed"
    gates.open([gate])
    assert stream.synchronize(5)
    assert gate.dirty
    driver.inject(faults.HungLink(source=0, target=0))
    stream.enqueue(gate.around(copy, store=True))
    until(lambda: gate.page.load(gate.base + 2) == 1, saying="the store is under way")
    assert [gates.clear_dirty(gate), gate.dirty] == [False, True]
    driver.clear(faults.HungLink(source=0, target=0))
    assert stream.synchronize(5)
    assert [gates.clear_dirty(gate), gate.dirty] == [True, False]
    stream.close()
    driver.unmap([address])
    driver.unreserve([address])
    driver.release([handle])
    gates.close_pages()


@pytest.mark.slow
def test_stores_that_race_the_cleaner_and_the_lender_leave_no_stale_byte(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "FIRST_RETRY", 0.001)
    monkeypatch.setattr(cleaner, "LAST_RETRY", 0.002)
    monkeypatch.setattr(cleaner, "LOOK", 0.001)
    client = node.connect(0)
    region = client.region(12 * CHUNK)
    rand, end, stop = random.Random(3), time.monotonic() + 2.5, threading.Event()
    held: dict[int, int] = {}
    trouble: list[BaseException] = []

    def store() -> None:
        try:
            while not stop.is_set():
                index = rand.randrange(12)
                version = held.get(index, 0) + 1
                region.store(pattern(version * 64 + index, CHUNK), at=index * CHUNK)
                held[index] = version
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            trouble.append(error)

    writer = threading.Thread(target=store)
    writer.start()
    moves = 0
    while time.monotonic() < end and writer.is_alive():
        for gpu in (1, 2, 3):
            taken = node.take_what_is_free(gpu)
            reclaimed(node, gpu)
            node.outsider.release([taken])
            moves += 1
    stop.set()
    writer.join(10)
    assert not trouble
    assert moves > 20
    for index, version in held.items():
        back = bytearray(CHUNK)
        region.fetch(index * CHUNK, back)
        assert back == pattern(version * 64 + index, CHUNK), f"chunk {index}, version {version}"
    reclaims = node.on_loop(lambda: {r.clean for r in node.agent.figures.recent})
    assert reclaims == {True, False}


@pytest.mark.parametrize("adrift", [False, True])
def test_a_twin_that_could_not_be_made_is_not_trusted(
    node: Node, monkeypatch: pytest.MonkeyPatch, adrift: bool
) -> None:
    monkeypatch.setattr("ema_agent.backing.COPY_LIMIT", 0.2)
    client = node.connect(0)
    region = client.region(CHUNK)
    first, second = pattern(1, CHUNK), pattern(2, CHUNK)
    region.store(first, at=0)
    node.all_clean()
    chunk = node.on_loop(lambda: next(iter(node.agent.ledger.chunks())))
    lender = node.gpus.index(chunk.place)  # type: ignore[arg-type]
    node.observer.inject(faults.HungLink(source=lender, target=-1))
    if adrift:  # as CUDA, which takes no copy back
        close = SimStream.close
        monkeypatch.setattr(SimStream, "close", lambda stream: close(stream) and False)
    region.store(second, at=0)
    until(lambda: chunk.gate.dirty)
    node.until(lambda a: a.cleaner._retry.get(chunk.id), within=3, saying="cleaning has failed")
    assert not chunk.has_true_twin
    pieces = node.on_loop(lambda: list(node.agent.backing._adrift))
    assert bool(pieces) is adrift
    assert chunk.twin not in pieces, "a copy that was given up may still write there"
    node.observer.clear(faults.HungLink(source=lender, target=-1))
    taken = node.take_what_is_free(lender)
    until(lambda: node.lent(lender) == 0)
    back = bytearray(CHUNK)
    region.fetch(0, back)
    assert back == second
    assert chunk.handle not in pieces
    node.outsider.release([taken])


def test_host_memory_that_is_spare_goes_back(make_node: Callable[..., Node]) -> None:
    node = make_node(SMALL, pool(reclaim={"hostMemory": "16Mi"}))
    client = node.connect(0)
    region = client.region(40 * CHUNK)
    node.all_clean()
    assert node.memory(-1).used >= 40 * CHUNK
    region.close()
    until(lambda: node.memory(-1).used <= 2 * MIB, within=3, saying="all but an eighth is given back")


def test_chunks_made_and_given_back_at_once_by_many_clients_leave_nothing(
    make_node: Callable[..., Node],
) -> None:
    node = make_node()
    trouble: list[BaseException] = []

    def churn(number: int) -> None:
        try:
            with ema.connect(node.socket, gpu=node.gpus[number % 2], name=f"c{number}") as client:
                for turn in range(12):
                    region = client.region((1 + turn % 5) * CHUNK, droppable=turn % 3 == 0)
                    if turn % 2:
                        region.store(pattern(turn, CHUNK), at=0)
                    region.close()
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            trouble.append(error)

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not trouble
    node.until(lambda a: not a.sessions)
    assert node.memory(0).used == node.before[node.gpus[0]].used
    assert node.on_loop(lambda: node.agent.ledger.lent[HOST]) == 0
