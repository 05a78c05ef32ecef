"""What a lost GPU costs a client that had bytes there, and that it costs the others nothing."""

import time
from collections.abc import Callable, Sequence

import pytest

import ema
from ema_agent import backing
from ema_agent.lease import Chunk, State
from ema_driver.sim import faults
from nodes import KIB, MIB, SMALL, Node, pattern, pool, until
from regions import right, stored

CHUNK = 256 * KIB
LIMIT = 4 * MIB


def only_from(node: Node, *lenders: int) -> None:
    """From now on memory is lent from these GPUs only; what is lent stays."""
    for gpu in range(1, 4):
        change = node.observer.clear if gpu in lenders else node.observer.inject
        change(faults.RefusedMemory(place=gpu))


def test_a_lost_region_is_closed_singly_and_its_quota_can_be_borrowed_again(make_node: Callable[..., Node]) -> None:
    node = make_node(SMALL, pool(borrowing={"maxPerPod": "4Mi"}))
    node.never_clean()
    client = node.connect(0)
    window = client.window(1, CHUNK)
    only_from(node, 1)
    lost = stored(client, LIMIT - CHUNK)
    program = client.program([lost.step(window[0])])
    only_from(node, 2)
    safe = stored(client, CHUNK)
    assert (node.lent(1), node.lent(2)) == (LIMIT - CHUNK, CHUNK)
    with pytest.raises(ema.LimitReached):
        client.region(CHUNK)
    node.observer.inject(faults.LostGpu(gpu=1))
    until(lambda: client._lost, saying="the owner was told")
    with pytest.raises(ema.DataLost):
        program.start()
    told, client._lost = client._lost, {}
    with pytest.raises(ema.EmaError, match="copies bytes that are lost"):
        program.start().wait(5.0)  # as one that has not heard of it yet
    client._lost = told
    program.close()
    lost.close()
    assert node.on_loop(lambda: [c.state for c in node.agent.ledger.chunks() if c.state is State.LOST]) == []
    assert right(safe), "what lies elsewhere goes on"
    assert right(stored(client, LIMIT - CHUNK)), "all of the limit can be borrowed again"
    assert (client.session, client.alive) == (1, True)
    only_from(node, 1, 2, 3)
    node.observer.clear(faults.LostGpu(gpu=1))


def test_a_lost_region_whose_run_never_ends_says_so_soon(node: Node) -> None:
    node.never_clean()
    client = node.connect(0)
    window = client.window(1, CHUNK)
    only_from(node, 1)
    region = stored(client, CHUNK)
    window[0].fill()  # so that the fetch waits for its slot when the GPU goes
    region.fetch(0, window[0])
    node.observer.inject(faults.LostGpu(gpu=1))
    until(lambda: client._lost, saying="the owner was told")
    began = time.monotonic()
    with pytest.raises(ema.InUse, match="close the pool"):
        region.close()
    assert time.monotonic() - began < 5.0
    client.close()
    node.until(lambda a: not a.sessions, saying="closing the pool gives everything back")
    node.observer.clear(faults.LostGpu(gpu=1))


def test_clients_without_bytes_on_a_lost_gpu_notice_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "PATIENCE", 2.0)
    node.never_clean()
    held, take = [], node.agent.backing.take

    def counted(chunks: Sequence[Chunk]) -> None:
        try:
            take(chunks)
        except backing.Held:
            held.append(chunks)
            raise

    node.agent.backing.take = counted  # type: ignore[method-assign]
    unlucky, lucky, there = node.connect(0), node.connect(0), node.connect(3)
    stored(there, CHUNK).close()  # makes its staging slots, before its own GPU refuses memory
    only_from(node, 1)
    gone = stored(unlucky, 4 * MIB)
    only_from(node, 2)
    safe = [stored(client, 4 * MIB) for client in (lucky, there)]
    assert (node.lent(1), node.lent(2)) == (4 * MIB, 8 * MIB)
    slots, into = lucky.window(2, CHUNK), unlucky.window(2, CHUNK)
    program = lucky.program([safe[0].step(slots[i % 2], at=i * CHUNK) for i in range(16)])
    # The lost GPU's link hangs, so that a copy from it is surely under way when it goes.
    node.observer.inject(faults.HungLink(source=1, target=0))
    gone.fetch(0, into[0])
    program.start()
    for i in range(16):
        if i == 8:
            node.observer.inject(faults.LostGpu(gpu=1))
            node.until(lambda a: len(a.sessions) == 2 or unlucky.session > 1, saying="the unlucky one begins anew")
        found = slots[i % 2].wait(5.0)
        assert found is not None
        assert bytes(found) == pattern(7, 4 * MIB)[i * CHUNK : (i + 1) * CHUNK]
        slots[i % 2].release()
    program.start().done  # noqa: B018 - raises if the connection had been lost
    for i in range(16):
        slots[i % 2].wait(5.0)
        slots[i % 2].release()
    assert all(map(right, safe))
    assert [c.session for c in (lucky, there)] == [1, 1]
    with pytest.raises((ema.AgentLost, ema.DataLost)):
        into[0].wait(5.0)
    node.observer.clear(faults.HungLink(source=1, target=0))
    node.until(lambda a: all(not s.closing for s in a.sessions.values()), saying="its first session has ended")
    assert len(held) <= 1, "a copy that broke off is waited for once at most"
    node.observer.clear(faults.LostGpu(gpu=1))
