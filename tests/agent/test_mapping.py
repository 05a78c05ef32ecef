"""Memory that cannot be mapped behind a chunk's address once its old memory is gone."""

from collections.abc import Callable

import pytest

import ema
from ema_agent import moves
from ema_agent.gates import GATE
from ema_agent.lease import State
from ema_core.plan import Cause
from ema_driver.sim import faults
from nodes import KIB, MIB, TINY, Node, pattern, until
from regions import right, stored

CHUNK = 256 * KIB
SIZE = 6 * MIB
HOST = -1


@pytest.fixture
def tight(make_node: Callable[..., Node]) -> Node:
    """Only one GPU lends, so that what leaves it goes to host memory."""
    node = make_node(TINY)
    node.on_loop(lambda: [node.agent.drain(gpu) for gpu in node.gpus[2:]])
    return node


def reclaim(node: Node, gpu: int = 1) -> None:
    node.on_loop(lambda: node.agent.drain(node.gpus[gpu]))
    until(lambda: node.memory(gpu).used == 0, saying="the lender has its bytes back")


def test_clean_chunks_whose_twins_are_mapped_late_are_right(tight: Node) -> None:
    region = stored(tight.connect(0), SIZE)
    tight.all_clean()
    tight.observer.inject(faults.RefusedMapping(place=HOST, maps=30))
    reclaim(tight)
    assert right(region)
    assert tight.lent(HOST) == SIZE


@pytest.mark.parametrize("after", [0, 1])
def test_dirty_chunks_that_are_mapped_late_are_right(tight: Node, after: int) -> None:
    tight.never_clean()
    region = stored(tight.connect(0), SIZE)
    tight.observer.inject(faults.RefusedMapping(place=HOST, maps=30, after=after))
    reclaim(tight)
    assert right(region)
    tight.settle()
    assert tight.lent(HOST) == SIZE


@pytest.mark.parametrize("clean", [True, False])
def test_chunks_that_cannot_be_mapped_are_lost_and_said_so_before_use(
    tight: Node, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    monkeypatch.setattr(moves, "LANDING", 0.1)
    client, other = tight.connect(0), tight.connect(0)
    if not clean:
        tight.never_clean()
    region = stored(client, SIZE)
    if clean:
        tight.all_clean()
    # Of a dirty batch the copy's own mapping succeeds; it is the last one that must not fail unseen.
    tight.observer.inject(faults.RefusedMapping(place=HOST, after=0 if clean else 1))
    window = client.window(1, CHUNK)
    tight.on_loop(lambda: tight.agent.drain(tight.gpus[1]))
    until(lambda: client._lost, saying="the owner was told")
    with pytest.raises(ema.DataLost, match="cannot be mapped") as caught:
        region.fetch(0, window[0])
    lost = tight.on_loop(lambda: [c for c in tight.agent.ledger.chunks() if c.state is State.LOST])
    assert {c.index for c in lost} >= set(caught.value.chunks) != set()
    assert all(c.gate.page.load(c.gate.base + GATE) == 0 for c in lost), "no copy can reach them"
    tight.observer.clear(faults.RefusedMapping(place=HOST))
    region.close()
    tight.on_loop(lambda: tight.agent.drain(tight.gpus[1], undo=True))
    assert right(stored(other, SIZE)), "others go on"
    assert right(stored(client, SIZE)), "and so does the owner"


def test_dropped_chunks_wait_for_their_scratch_memory(tight: Node) -> None:
    region = stored(tight.connect(0), SIZE, droppable=True)
    tight.observer.inject(faults.RefusedMapping(place=HOST, maps=30))
    tight.on_loop(lambda: tight.agent.losses._steward.moves.drop(list(tight.agent.ledger.chunks()), Cause.HEALTH, 0.0))
    until(lambda: region.gone() == list(range(SIZE // CHUNK)))
    with pytest.raises(ema.Reclaimed):
        right(region)
    assert len(region.renew(timeout=5.0)) == SIZE // CHUNK
    region.store(pattern(7, SIZE), at=0)
    assert right(region)


def test_a_client_that_dies_with_chunks_that_cannot_be_mapped_gives_everything_back(
    tight: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "LANDING", 0.1)
    client = tight.connect(0)
    stored(client, SIZE)
    tight.all_clean()
    tight.observer.inject(faults.RefusedMapping(place=HOST))
    tight.on_loop(lambda: tight.agent.drain(tight.gpus[1]))
    until(lambda: client._lost, saying="the owner was told")
    client.close()
    tight.until(lambda a: not a.sessions, saying="it has left")
    assert tight.memory(1).used == 0
    tight.observer.clear(faults.RefusedMapping(place=HOST))
