"""What the agent does behind chunk addresses, on a real GPU: chunks go up and down under a running graph."""

import statistics
import time
from collections.abc import Callable

import pytest

from ema_agent.backing import Backing
from ema_agent.gates import Gates
from ema_agent.lease import Chunk, Lease, Region
from ema_agent.ledger import Ledger
from ema_core.ids import HOST, LeaseId, PoolName
from ema_driver.protocol import Copy, MemoryDriver, Op, Wait, Write

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE, COUNT, SLOTS = 64 * MIB, 16, 2
Record = Callable[[str, object], None]


def pattern(chunk: int, size: int) -> bytes:
    return (chunk * 7 + 1).to_bytes(8, "little") * (size // 8)


def chunks_at_host(driver: MemoryDriver, backing: Backing) -> list[Chunk]:
    ledger, region = Ledger(), Region(0, droppable=False)
    lease = Lease(LeaseId("moves"), PoolName("moves"), driver.devices()[0].id, SIZE)
    ledger.open_lease(lease)
    lease.regions[0] = region
    found = []
    for i, fresh in enumerate(backing.fresh(HOST, SIZE, COUNT)):
        region.chunks.append(None)
        ledger.promise(lease, region, i, HOST)
        chunk = ledger.arrive(lease, region, i, address=fresh.address, gate=fresh.gate, handle=fresh.handle)
        driver.write(chunk.address, pattern(i, SIZE))
        found.append(chunk)
    return found


def test_chunks_move_between_host_and_gpu_under_a_running_graph(cuda: MemoryDriver, record_property: Record) -> None:
    gpu = cuda.devices()[0].id
    before = cuda.memory()[gpu].free
    gates = Gates(cuda)
    backing = Backing(cuda, gates, gpu)
    chunks = chunks_at_host(cuda, backing)
    window, memory = cuda.reserve(SIZE * SLOTS), cuda.create(gpu, SIZE * SLOTS)
    cuda.map([(window, memory)])
    page = cuda.words(64)
    stream = cuda.stream(gpu)
    ops: list[Op] = []
    for i, chunk in enumerate(chunks):
        slot = 16 * (i % SLOTS)
        ops.append(Wait(page, slot, 0))
        ops += chunk.gate.around(Copy(window + (i % SLOTS) * SIZE, chunk.address, SIZE), store=False)
        ops.append(Write(page, slot, 1))
    graph = stream.instantiate(ops)
    took: dict[str, list[float]] = {"up": [], "down, clean": [], "down, dirty": []}

    def timed(name: str, work: Callable[[], None]) -> None:
        began = time.monotonic()
        work()
        gates.open([c.gate for c in chunks])
        took[name].append((time.monotonic() - began) * 1e3)

    def up() -> None:
        backing.take(chunks)
        backing.copy_to(chunks, gpu)

    def clean() -> None:
        backing.take(chunks)
        backing.vacate(chunks)
        assert backing.appear(chunks) is None

    def dirty() -> None:
        for c in chunks:
            c.gate.mark_dirty()
        backing.take(chunks)
        backing.copy_to(chunks, HOST)

    def visit() -> None:
        for i in range(COUNT):
            slot = i % SLOTS
            assert page.wait(16 * slot, 1, 10)
            assert cuda.read(window + slot * SIZE, MIB) == pattern(i, MIB)
            assert cuda.read(window + (slot + 1) * SIZE - MIB, MIB) == pattern(i, MIB)
            page.store(16 * slot, 0)

    for _ in range(4):
        for name, work in (("up", up), ("down, clean", clean), ("up", up), ("down, dirty", dirty)):
            graph.launch()
            timed(name, work)
            visit()
    assert stream.synchronize(10)
    for name, times in took.items():
        record_property(f"1 GiB {name}", f"median {statistics.median(times):.2f} ms, max {max(times):.2f} ms")
    graph.close()
    stream.close()
    backing.give_back(chunks)
    backing.stock.trim(0)
    gates.close_pages()
    page.close()
    cuda.unmap([window])
    cuda.unreserve([window])
    cuda.release([memory])
    assert cuda.memory()[gpu].free == pytest.approx(before, abs=12 * MIB)
