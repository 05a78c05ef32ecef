"""Where reclaimed bytes go: another lender, host memory, nowhere; and who has to give way to whom."""

from collections.abc import Callable

import pytest

import ema
from ema_core.ids import LeaseId
from nodes import KIB, MIB, TINY, Node, pattern, pool, until
from regions import right, stored

CHUNK = 256 * KIB


def test_first_to_a_peer_then_to_the_host(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    region = stored(node.connect(0), 6 * MIB)
    for gpu in (1, 2):
        node.take_all_but(gpu, 2 * MIB)
        until(lambda gpu=gpu: node.lent(gpu) == 0)  # type: ignore[misc]
        assert node.lent(-1) == 0, "a peer has room"
    assert node.lent(3) == 6 * MIB
    assert right(region)
    node.take_all_but(3, 2 * MIB)
    until(lambda: node.lent(-1) == 6 * MIB)
    assert right(region)
    until(lambda: region.rate == 1_000_000_000, saying="the client knows that it is slower now")


def test_the_rate_of_a_region_is_that_of_one_fetch_of_all_of_it(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    for gpu in (2, 3):
        node.take_all_but(gpu, 2 * MIB)
    client = node.connect(0)
    region = client.region(8 * MIB)
    assert region.rate == 4_000_000_000
    node.take_all_but(1, 6 * MIB)
    until(lambda: 0 < node.lent(-1) < 8 * MIB)
    node.settle()
    far = node.lent(-1)
    assert 0 < far < 8 * MIB
    seconds = far / 1_000_000_000 + (8 * MIB - far) / 4_000_000_000
    until(lambda: region.rate == round(8 * MIB / seconds), saying="the client knows the rate of all of it")
    region.shrink(CHUNK)
    assert region.rate in (4_000_000_000, 1_000_000_000), "what is left is in one place"


def test_bytes_come_back_from_the_host_when_a_lender_has_room(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    region = stored(node.connect(0), 3 * MIB)
    held = [h for gpu in (1, 2, 3) for h in node.take_all_but(gpu, 2 * MIB)]
    until(lambda: node.lent(-1) == 3 * MIB)
    node.outsider.release(held)
    until(lambda: node.lent(-1) == 0, saying="everything is promoted")
    assert right(region)


def test_droppable_bytes_are_dropped_when_nothing_else_has_room(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY, pool(reclaim={"spillTo": ["Drop"]}))
    region = stored(node.connect(0), 6 * MIB, droppable=True)
    held = [h for gpu in (1, 2, 3) for h in node.take_all_but(gpu, 2 * MIB)]
    until(lambda: not any(node.lent(gpu) for gpu in (1, 2, 3)))
    with pytest.raises(ema.Reclaimed) as caught:
        right(region)
    assert caught.value.chunks
    assert region.gone() == list(range(24))
    with pytest.raises(ema.Reclaimed):
        region.store(bytes(CHUNK), at=0)
    with pytest.raises(ema.PoolFull):
        region.renew(timeout=0.05)
    assert region.gone() == list(range(24)), "renewed in vain: still gone"
    node.outsider.release(held)
    node.settle()
    assert region.gone() == list(range(24)), "nobody asked for it again"
    with pytest.raises(ema.Reclaimed):
        right(region)
    assert region.renew() == list(range(24))
    assert region.gone() == []
    region.store(pattern(7, 6 * MIB), at=0)
    assert right(region)


def test_bytes_that_must_be_kept_are_lent_only_with_host_room_behind_them(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY, pool(reclaim={"hostMemory": "4Mi"}))
    client = node.connect(0)
    with pytest.raises(ema.PoolFull):
        client.region(5 * MIB, timeout=0.1)
    region = stored(client, 4 * MIB)
    other = node.connect(1)
    with pytest.raises(ema.PoolFull):
        other.region(CHUNK, timeout=0.1)
    assert stored(other, 8 * MIB, droppable=True).size == 8 * MIB
    held = [h for gpu in (1, 2, 3) for h in node.take_all_but(gpu, 2 * MIB)]
    until(lambda: node.lent(-1) == 4 * MIB and not any(node.lent(gpu) for gpu in (1, 2, 3)))
    assert right(region)
    assert node.on_loop(lambda: node.agent.figures.overdue_bytes) == 0
    node.outsider.release(held)


def test_a_higher_priority_takes_from_a_lower_one(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    low, high = node.connect(0, name="low"), node.connect(0, name="high")
    node.on_loop(lambda: setattr(node.agent.ledger.leases[LeaseId(high.lease)], "priority", 10))
    room = sum(node.memory(gpu).free for gpu in (1, 2, 3))
    region = stored(low, 30 * MIB)
    assert room - 30 * MIB < 20 * MIB
    above = stored(high, 20 * MIB)
    assert node.lent(-1) > 0
    by_place = node.on_loop(lambda: dict(node.agent.ledger.leases[LeaseId(high.lease)].held))
    assert sum(sum(a) for p, a in by_place.items() if p != "host") == 20 * MIB, "all of it on GPUs"
    assert right(above)
    assert right(region)


def test_among_equals_nobody_takes_what_a_fair_share_allows(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY, pool(lending={"maxPerGPU": "4Mi"}))
    first, second = node.connect(0, name="first"), node.connect(0, name="second")
    stored(first, 12 * MIB)
    stored(second, 6 * MIB)
    node.settle()
    on_gpus = node.on_loop(
        lambda: {
            e.name: sum(sum(a) for p, a in e.held.items() if p != "host") for e in node.agent.ledger.leases.values()
        }
    )
    assert on_gpus == {"first": 6 * MIB, "second": 6 * MIB}
