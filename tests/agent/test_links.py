"""Links that lie, are slow, or hang: other ways are found, and nobody else waits."""

from collections.abc import Callable

import pytest

from ema_agent import backing
from ema_agent.gates import BUSY_FETCH
from ema_core.ids import GpuId
from ema_driver.sim import faults
from ema_driver.sim.streams import SimStream
from nodes import KIB, MIB, Node, pattern, sim, until
from regions import right, stored

CHUNK = 256 * KIB


def test_a_pair_that_lies_is_barred_with_its_reason(make_node: Callable[..., Node]) -> None:
    lies = (
        faults.LyingPair(source=1, target=0),
        faults.LyingPair(source=2, target=0, how="corrupt"),
        faults.HungLink(source=3, target=1),
    )
    node = make_node(sim(faults=lies))
    one, two, three = node.gpus[1:]
    barred = node.on_loop(lambda: dict(node.agent.node.barred))
    assert barred.keys() == {(one, node.gpus[0]), (two, node.gpus[0]), (three, one)}
    assert "bytes were wrong" in barred[one, node.gpus[0]]
    assert barred[three, one] == "the test did not end in 2 s"
    region = stored(node.connect(0), 6 * MIB)
    assert (node.lent(1), node.lent(2), node.lent(3)) == (0, 0, 6 * MIB)
    assert right(region)


@pytest.mark.parametrize(("source", "target"), [(1, -1), (-1, 1)])
def test_a_gpu_without_a_true_way_to_the_host_lends_nothing(
    make_node: Callable[..., Node], source: int, target: int
) -> None:
    node = make_node(sim(faults=(faults.LyingPair(source=source, target=target),)))
    assert right(stored(node.connect(0), 6 * MIB))
    assert (node.lent(1), node.lent(2) + node.lent(3)) == (0, 6 * MIB)


def test_a_slow_link_costs_time_and_nothing_else(node: Node) -> None:
    node.observer.inject(faults.SlowLink(source=1, target=0, factor=20))
    region = stored(node.connect(0), 6 * MIB)
    assert right(region)
    taken = node.take_what_is_free(1)
    until(lambda: node.lent(1) == 0 or node.memory(1).free >= 2 * MIB)
    assert right(region)
    node.outsider.release([taken])


@pytest.mark.parametrize("adrift", [False, True])
def test_a_link_that_hangs_under_a_reclaim_is_barred_and_another_way_is_found(
    node: Node, monkeypatch: pytest.MonkeyPatch, adrift: bool
) -> None:
    monkeypatch.setattr(backing, "COPY_LIMIT", 0.2)
    if adrift:  # as CUDA, which takes no copy back
        close = SimStream.close
        monkeypatch.setattr(SimStream, "close", lambda stream: close(stream) and False)
    node.never_clean()
    region = stored(node.connect(0), 6 * MIB)
    node.observer.inject(faults.HungLink(source=1, target=2))
    node.observer.inject(faults.HungLink(source=1, target=3))
    node.observer.inject(faults.Xid(gpu=1, code=79))
    until(lambda: node.memory(1).used == 0, saying="the bytes went another way")
    node.settle()
    assert right(region)
    barred = node.on_loop(lambda: dict(node.agent.node.barred))
    assert barred.keys() <= {(node.gpus[1], node.gpus[2]), (node.gpus[1], node.gpus[3])}
    assert node.lent(-1) == 0, "by way of host memory to another lender"
    assert all("did not end" in why for why in barred.values())
    assert barred
    kept = node.on_loop(lambda: [h.place for h in node.agent.backing._adrift])
    assert set(kept) == ({target for _, target in barred} if adrift else set())
    for target in (2, 3):
        node.observer.clear(faults.HungLink(source=1, target=target))


def test_a_fetch_that_hangs_on_its_link_keeps_its_chunk_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing, "PATIENCE", 0.3)
    client, other = node.connect(0), node.connect(2)
    region, safe = stored(client, CHUNK), stored(other, 6 * MIB)
    node.all_clean()
    (chunk,) = node.on_loop(lambda: [c for c in node.agent.ledger.chunks() if c.lease.id == client.lease])
    lender = node.gpus.index(GpuId(chunk.place))
    node.observer.inject(faults.HungLink(source=lender, target=0))
    window = client.window(1, CHUNK)
    region.fetch(0, window[0])
    until(lambda: chunk.gate.page.load(chunk.gate.base + BUSY_FETCH) == 1, saying="the copy is under way")
    node.on_loop(lambda: node.agent.drain(node.gpus[lender]))
    node.until(lambda a: (node.gpus[lender], node.gpus[0]) in a.node.barred, saying="the link is barred")
    assert right(safe)
    node.observer.clear(faults.HungLink(source=lender, target=0))
    fetched = window[0].wait(5)
    assert fetched is not None
    assert bytes(fetched) == pattern(7, CHUNK)
    until(lambda: node.lent(lender) == 0)
    assert right(region)
