"""Bytes in neighbours' memory: stored, fetched, moved and checked over a real agent."""

import time
from collections.abc import Iterator
from math import inf

import pytest

import ema
from ema_cli.demo.borrowed import Borrowed
from ema_cli.demo.own import Kept, Own
from ema_cli.demo.pattern import Pattern
from ema_cli.demo.server import Server
from ema_driver.sim import SimDriver
from ema_driver.sim.faults import LyingPair
from ema_driver.sim.start import SOCKET

CHUNK = 64 << 10
POOL = {
    "apiVersion": "ema.dev/v1alpha1",
    "kind": "MemoryPool",
    "metadata": {"name": "demo"},
    "spec": {
        "chunkSize": CHUNK,
        "lending": {"maxPerGPU": "90%", "headroom": CHUNK, "hysteresis": 0},
        "reclaim": {"hostMemory": 64 << 20},
    },
}
SIM = {"gpus": [{"count": 2, "memory": 8 << 20}], "hostMemory": 128 << 20, "granularity": 4096, "linger": "1s"}
PATTERN = Pattern(seed=3, largest=1 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(POOL, SIM) as started:
        yield started


@pytest.fixture
def pool(server: Server) -> Iterator[ema.Pool]:
    before = server.free()
    with ema.connect(server.socket, gpu=0) as connected:
        yield connected
    end = time.monotonic() + 5.0
    while server.free() != before:
        assert time.monotonic() < end, "something was not given back"
        time.sleep(0.01)


def borrowed(pool: ema.Pool, size: int) -> Borrowed:
    made = Borrowed(pool, PATTERN, pool.window(2, 4 * CHUNK), pool.window(2, CHUNK))
    made.region = pool.region(size)
    made.look()
    return made


def test_what_is_stored_comes_back_right(pool: ema.Pool) -> None:
    memory = borrowed(pool, 40 * CHUNK)
    kept = [Kept(owner, 300_000, borrowed=True) for owner in range(1, 8)]
    for one in kept:
        memory.store(one, 100_000)
    for one in kept:
        memory.store(one, 300_000)  # its second extent lies behind everybody's first
    memory.fetch(memory.pieces(kept) * 3, needed_at=inf)
    memory.settle()
    assert memory.wrong == 0
    assert memory.fetched >= 3 * 7 * 300_000
    assert memory.stored == 7 * 300_000


def test_a_byte_that_a_link_flips_is_seen(server: Server, pool: ema.Pool) -> None:
    memory = borrowed(pool, 8 * CHUNK)
    kept = Kept(1, 2 * CHUNK, borrowed=True)
    memory.store(kept, kept.size)
    memory.settle()
    with SimDriver.connect(server.folder / SOCKET) as driver:
        gpus = {device.id: number for number, device in enumerate(driver.devices())}
        lie = LyingPair(source=1 - gpus[pool.gpu], target=gpus[pool.gpu], how="corrupt")
        driver.inject(lie)
        try:
            memory.fetch(memory.pieces([kept]), needed_at=inf)
            memory.settle()
        finally:
            driver.clear(lie)
    assert memory.wrong > 0


def test_shrinking_moves_what_lies_beyond(pool: ema.Pool) -> None:
    memory = borrowed(pool, 32 * CHUNK)
    first, second = Kept(1, 10 * CHUNK, borrowed=True), Kept(2, 10 * CHUNK, borrowed=True)
    memory.store(first, first.size)
    memory.store(second, second.size)
    memory.give(first.extents)
    memory.shrink(10 * CHUNK, [second])
    assert memory.held == 10 * CHUNK
    memory.fetch(memory.pieces([second]), needed_at=inf)
    memory.settle()
    assert memory.wrong == 0
    memory.give(second.extents)
    memory.shrink(0, [])
    assert memory.region is None


def test_the_share_moves_and_checks_too(pool: ema.Pool) -> None:
    own = Own(pool.share(40 * CHUNK), PATTERN, weights=8 * CHUNK)
    own.load_weights()
    own.share.grow(own.wanted(16 * CHUNK))
    own.look()
    first, second = Kept(1, 6 * CHUNK, borrowed=False), Kept(2, 6 * CHUNK, borrowed=False)
    own.write(first, first.size)
    own.write(second, 5 * CHUNK + 17)
    own.arena.give(first.extents)
    own.shrink(6 * CHUNK, [second])
    assert own.grown == 6 * CHUNK
    assert own.wrong(second) == 0
    assert own.wrong_weights() == 0
    own.share.page(8)[5] ^= 1
    assert own.wrong(second) == 1
    own.share.page(3)[9] ^= 1
    assert own.wrong_weights() == 1
