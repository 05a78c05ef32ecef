"""GPUs that are lost, and memory that is refused or not to be read: who is told, and that the others go on."""

import time
from collections.abc import Callable

import pytest

import ema
from ema_agent import agent as agent_module
from ema_agent import health
from ema_agent.health import Health
from ema_driver.sim import GpuGroup, faults
from nodes import KIB, MIB, SMALL, TINY, Node, pattern, pool, sim, until
from regions import right, stored

CHUNK = 256 * KIB


@pytest.mark.parametrize("fault", [faults.LostGpu, faults.RemovedGpu])
def test_bytes_with_a_true_copy_survive_their_gpu(
    node: Node, fault: type[faults.LostGpu | faults.RemovedGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "POLL", 0.05)
    region = stored(node.connect(0), 6 * MIB)
    node.all_clean()
    node.observer.inject(fault(gpu=1))
    until(lambda: node.lent(1) == 0)
    assert right(region)
    assert node.on_loop(node.agent.figures.lost_bytes.total) == 0
    node.until(lambda a: a.node.unhealthy.keys() == {node.gpus[1]})
    again = stored(node.connect(0), 6 * MIB)
    assert node.lent(1) == 0, "nothing is lent from a lost GPU"
    assert right(again)
    node.observer.clear(fault(gpu=1))


def test_owners_are_told_of_lost_bytes_before_they_can_use_them(node: Node) -> None:
    node.never_clean()
    client, other = node.connect(0), node.connect(0)
    region, safe = stored(client, 6 * MIB), None
    there = node.lent(2)
    node.observer.inject(faults.LostGpu(gpu=2))
    until(lambda: node.on_loop(node.agent.figures.lost_bytes.total) == there)
    with pytest.raises(ema.DataLost, match="fallen off the bus") as caught:
        right(region)
    assert len(caught.value.chunks) * CHUNK == there
    assert node.lent(2) == 0
    safe = stored(other, 2 * MIB)
    assert right(safe), "others go on"
    client.close()
    node.until(lambda a: len(a.sessions) == 1, saying="the owner can leave")
    node.observer.clear(faults.LostGpu(gpu=2))


def test_droppable_bytes_of_a_lost_gpu_are_dropped(node: Node) -> None:
    region = stored(node.connect(0), 6 * MIB, droppable=True)
    there = node.lent(1)
    node.observer.inject(faults.LostGpu(gpu=1))
    until(region.gone, saying="chunks are dropped")
    with pytest.raises(ema.Reclaimed):
        right(region)
    gone = region.gone()
    assert len(gone) * CHUNK == there
    assert region.renew() == gone
    region.store(pattern(7, 6 * MIB), at=0)
    assert right(region)
    node.observer.clear(faults.LostGpu(gpu=1))


def test_a_lost_gpu_lends_again_when_it_has_been_back_for_a_while(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "QUIET", 0.3)
    monkeypatch.setattr(Health.__init__, "__defaults__", (0.3,))
    node = make_node(TINY)
    region = stored(node.connect(0), 3 * MIB)
    node.all_clean()
    node.observer.inject(faults.LostGpu(gpu=1))
    until(lambda: node.lent(1) == 0)
    node.observer.clear(faults.LostGpu(gpu=1))
    back_at = time.monotonic()
    node.until(lambda a: node.gpus[1] in a.node.unhealthy)
    node.until(lambda a: not a.node.unhealthy and not a.node.lost)
    assert time.monotonic() - back_at >= 0.25
    more = stored(node.connect(0), 30 * MIB)
    assert node.lent(1) > 0
    assert right(region)
    assert right(more)


def test_a_gpu_that_is_gone_at_the_start_does_not_keep_the_others_from_serving(make_node: Callable[..., Node]) -> None:
    node = make_node(sim(faults=(faults.LostGpu(gpu=0),)))
    assert right(stored(node.connect(1), 4 * MIB))
    assert node.lent(0) == 0
    assert node.on_loop(lambda: node.agent.node.skipped).keys() == {node.gpus[0]}


def test_identity_is_the_uuid_whatever_the_enumeration(make_node: Callable[..., Node]) -> None:
    node = make_node(sim(shuffle_enumeration=True, seed=5))
    order = [d.id for d in node.observer.devices()]
    assert order != sorted(order)
    assert list(node.agent.node.devices) == sorted(order)
    client = node.connect(2)
    assert client.gpu == node.gpus[2]
    assert right(stored(client, 2 * MIB))


def test_a_gpu_removed_while_no_agent_runs_changes_nothing_for_the_others(node: Node) -> None:
    client = node.connect(3)
    share = client.share(2 * MIB)
    share.grow(2 * MIB)
    share.page(0)[:4] = b"mine"
    before = client.gpu
    node.stop()
    node.observer.inject(faults.RemovedGpu(gpu=0))
    node.start()
    until(lambda: client.alive)
    assert client.gpu == before
    assert bytes(share.page(0)[:4]) == b"mine"
    assert right(stored(client, 2 * MIB))
    node.observer.clear(faults.RemovedGpu(gpu=0))


def test_a_place_that_refuses_memory_is_passed_over_without_a_busy_loop(node: Node) -> None:
    client = node.connect(0)
    node.observer.inject(faults.RefusedMemory(place=1))
    plans = node.on_loop(lambda: sum(node.agent.figures.plans.counts))
    region = stored(client, 6 * MIB)
    assert node.lent(1) == 0
    assert right(region)
    node.observer.inject(faults.RefusedMemory(place=2))
    node.observer.inject(faults.RefusedMemory(place=3))
    with pytest.raises(ema.PoolFull):
        client.region(4 * MIB, timeout=0.5)
    assert node.on_loop(lambda: sum(node.agent.figures.plans.counts)) - plans < 150
    for gpu in (1, 2, 3):
        node.observer.clear(faults.RefusedMemory(place=gpu))
    assert right(stored(client, 4 * MIB))


def test_a_reclaim_goes_on_when_the_host_refuses_memory_for_a_while(node: Node) -> None:
    node.never_clean()
    region = stored(node.connect(0), 6 * MIB)
    node.observer.inject(faults.RefusedMemory(place=-1))
    taken = [h for gpu in (2, 3) for h in node.take_all_but(gpu, 2 * MIB)]
    until(lambda: node.lent(1) == 6 * MIB)
    assert right(region)
    first = node.take_what_is_free(1)
    plans = node.on_loop(lambda: sum(node.agent.figures.plans.counts))
    until(lambda: node.on_loop(lambda: sum(node.agent.figures.plans.counts)) > plans + 5)
    assert node.lent(1) == 6 * MIB
    node.observer.clear(faults.RefusedMemory(place=-1))
    until(lambda: node.memory(1).free >= 2 * MIB)
    assert right(region)
    node.outsider.release([*taken, first])


def test_bytes_given_back_and_not_free_are_shown_as_leaked_until_they_are(node: Node) -> None:
    borrower = node.borrower(0)
    borrower.ask("region", 6 * MIB)
    node.observer.inject(faults.StuckMemory(place=1))
    lent = node.lent(1)
    borrower.kill()
    node.until(lambda a: not a.sessions)
    node.until(lambda a: a.node.leaked == {node.gpus[1]: lent}, saying="the bytes are leaked")
    assert node.memory(1).used == lent
    used = node.on_loop(lambda: node.agent.node.used(node.gpus[1]))
    assert used == lent, "nobody is lent what is not free"
    node.observer.clear(faults.StuckMemory(place=1))
    node.until(lambda a: not a.node.leaked, saying="they were seen free")


def test_while_memory_queries_hang_nothing_is_lent_and_what_is_lent_goes_on(node: Node) -> None:
    client = node.connect(0)
    region = stored(client, 3 * MIB)
    node.observer.inject(faults.HungQueries(gpu=2))
    node.until(lambda a: "has not answered" in a.trouble)
    with pytest.raises(ema.PoolFull):
        client.region(MIB, timeout=0.2)
    assert right(region)
    node.observer.clear(faults.HungQueries(gpu=2))
    node.until(lambda a: not a.trouble)
    assert right(stored(client, MIB))


@pytest.mark.parametrize("fault", [faults.UnsupportedMemory, faults.NonsenseMemory])
def test_a_gpu_whose_memory_query_is_no_good_is_skipped_with_the_reason(
    make_node: Callable[..., Node], fault: type[faults.UnsupportedMemory | faults.NonsenseMemory]
) -> None:
    node = make_node(sim(faults=(fault(gpu=2),)))
    assert right(stored(node.connect(0), 6 * MIB))
    assert node.lent(2) == 0
    assert node.on_loop(lambda: dict(node.agent.node.skipped)) == {
        node.gpus[2]: "its memory query gives no plausible answer"
    }


def test_sizes_are_per_device(make_node: Callable[..., Node]) -> None:
    groups = (
        GpuGroup(count=1, memory=16 * MIB),
        GpuGroup(count=1, memory=80 * MIB),
        GpuGroup(count=1, memory=16 * MIB),
    )
    node = make_node(sim(gpus=groups), pool(lending={"maxPerGPU": "90%"}))
    region = stored(node.connect(0), 40 * MIB)
    assert node.lent(1) >= 28 * MIB
    assert node.lent(2) <= 14 * MIB
    assert right(region)


def test_what_the_driver_reserves_is_never_lent(make_node: Callable[..., Node]) -> None:
    group = GpuGroup(count=2, memory=16 * MIB, reserved=5 * MIB)
    node = make_node(sim(gpus=(group,)), pool(lending={"maxPerGPU": "100%"}))
    client = node.connect(0)
    with pytest.raises(ema.PoolFull):
        client.region(9 * MIB + CHUNK, timeout=0.1)
    assert right(stored(client, 9 * MIB))
    assert SMALL.granularity <= CHUNK
