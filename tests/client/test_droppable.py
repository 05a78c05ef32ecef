"""Droppable bytes: `Reclaimed` comes before they can be used, whatever was queued, renewed or numbered alike."""

from collections.abc import Iterator

import pytest

import ema
from ema_driver.sim.session import SimHandle
from nodes import KIB, Node, node, pattern, pool, sim, until


@pytest.fixture
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose GPUs drop what they can when they are short."""
    with node(
        tmp_path_factory.mktemp("n"),
        sim(link_delays=False, granularity=4096),
        pool(chunk="64Ki", reclaim={"spillTo": ["Drop"], "hostMemory": "0"}, lending={"headroom": "512Ki"}),
    ) as it:
        yield it


def squeeze(it: Node) -> list[SimHandle]:
    """Take what the lenders have: everything droppable is dropped."""
    held = []
    for gpu in it.gpus[1:]:
        free = it.observer.memory()[gpu].free
        held.append(it.observer.create(gpu, free // 4096 * 4096 - 64 * KIB))
    return held


def test_reclaimed_comes_first_and_renewed_bytes_are_new(tight: Node) -> None:
    client = tight.connect(0)
    region, window = client.region(4 * client.chunk, droppable=True), client.window(2, 4096)
    region.store(pattern(1, region.size), at=0)
    region.fetch(0, into=window[0])
    assert bytes(window[0].wait(5.0) or b"") == pattern(1, region.size)[:4096]
    window[0].release()
    window[1].fill()
    queued = region.fetch(0, into=window[1])  # waits for its slot, and is overtaken
    held = squeeze(tight)
    until(lambda: region.gone() == [0, 1, 2, 3], saying="all is dropped")
    for into in (bytearray(8), window[0]):
        with pytest.raises(ema.Reclaimed) as caught:
            region.fetch(0, into=into)
        assert caught.value.chunks == [0]
    with pytest.raises(ema.Reclaimed):
        region.store(b"x", at=0)
    window[1].release()
    queued.wait(5.0)
    with pytest.raises(ema.PoolFull):
        region.renew(timeout=0.1)
    assert region.gone() == [0, 1, 2, 3], "asked for in vain is still gone"
    with pytest.raises(ema.Reclaimed):
        region.fetch(0, into=bytearray(8))
    tight.observer.release(held)
    assert region.renew(timeout=5.0) == [0, 1, 2, 3]
    with pytest.raises(ema.Reclaimed):
        window[1].wait(5.0)  # read before the renewal
    assert region.gone() == []
    found = bytearray(region.size)
    region.fetch(0, found)
    assert found == bytes(region.size)
    region.store(b"new", at=5)
    region.fetch(5, into=memoryview(found)[:3])
    assert found[:3] == b"new"


def test_a_later_region_with_the_same_number_hears_of_its_own_drops(tight: Node) -> None:
    client = tight.connect(0)
    for _ in range(2):
        region = client.region(client.chunk, droppable=True)
        assert region.number == 0
        found = bytearray(8)
        region.store(b"12345678", at=0)
        region.fetch(0, found)
        assert found == b"12345678"
        held = squeeze(tight)
        tight.until(lambda a: all(c.state == "dropped" for c in a.ledger.chunks()), saying="all is dropped")
        with pytest.raises(ema.Reclaimed):
            region.fetch(0, found)
        region.close()
        tight.observer.release(held)
