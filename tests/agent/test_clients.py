"""Clients that die, wait, and compete."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ema
from ema_agent.report import leases
from nodes import KIB, MIB, SMALL, TINY, Node, pool, sim, until
from regions import right, stored

CHUNK = 256 * KIB


@contextlib.contextmanager
def lender_that_comes_and_goes(node: Node, gpu: int) -> Iterator[None]:
    """Meanwhile somebody takes all of a GPU's memory and gives it back, again and again."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            taken = node.take_what_is_free(gpu)
            stop.wait(0.02)
            node.outsider.release([taken])
            stop.wait(0.02)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("reclaiming", [False, True])
def test_a_client_killed_at_any_step_leaves_nothing_and_disturbs_nobody(node: Node, reclaiming: bool) -> None:
    region = stored(node.connect(2), 3 * MIB)
    with lender_that_comes_and_goes(node, 1) if reclaiming else contextlib.nullcontext():
        command = [sys.executable, str(Path(__file__).parent / "mortal.py"), node.socket, node.gpus[0]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
        lives = done.stdout.split("\n")[:-1]
        assert len(lives) == 18
        assert all(line.endswith("True") for line in lives), lives
        node.until(lambda a: len(a.sessions) == 1, saying="every dead client's session has ended")
    assert right(region)
    assert not any(node.on_loop(lambda: dict(node.agent.node.promised)).values())
    assert node.on_loop(lambda: node.agent.why_ended) is None
    until(lambda: node.memory(0).used == node.lent(0), saying="their windows are free")


def test_memory_that_comes_while_a_dead_client_waits_for_it_goes_to_the_next(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY, pool(reclaim={"minHold": "60s"}))
    first = node.connect(0).region(30 * MIB)
    borrower = node.borrower(0)
    borrower.tell("region", 15 * MIB, False, 30.0)
    node.until(lambda a: a.steward.waiting)
    borrower.kill()
    first.close()
    node.until(lambda a: len(a.sessions) == 1)
    assert node.on_loop(lambda: dict(node.agent.steward.waiting)) == {}
    assert node.connect(0).region(30 * MIB).size == 30 * MIB


def test_a_request_that_waits_has_a_place_and_a_deadline(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY, pool(reclaim={"minHold": "60s"}))
    holder, second, third = (node.connect(0, name=name) for name in ("holder", "second", "third"))
    region = stored(holder, MIB)
    rest = holder.region(35 * MIB)
    failures: dict[str, ema.PoolFull] = {}

    def ask(client: ema.Pool, name: str) -> None:
        try:
            client.region(20 * MIB, timeout=1.0 if name == "second" else 0.7)
        except ema.PoolFull as full:
            failures[name] = full

    threads = []
    for place, (name, client) in enumerate((("second", second), ("third", third))):
        threads.append(threading.Thread(target=ask, args=(client, name)))
        threads[-1].start()
        until(lambda client=client, place=place: client.queue_position == place)  # type: ignore[misc]
    for client in (second, third):
        assert client.queue_deadline is not None
        assert 0 < client.queue_deadline - time.monotonic() <= 1.0
    rows = {e["name"]: e for e in node.on_loop(lambda: leases(node.agent, time.monotonic()))}
    assert [rows[n]["position"] for n in ("holder", "second", "third")] == [None, 0, 1]
    assert rows["holder"]["deadline"] is None
    assert all(0 < rows[n]["deadline"] <= 1.0 for n in ("second", "third"))
    for thread in threads:
        thread.join(10)
    assert {name: full.position for name, full in failures.items()} == {"second": 0, "third": 1}
    assert second.queue_position is None
    assert second.queue_deadline is None
    assert node.on_loop(lambda: dict(node.agent.steward.waiting)) == {}
    assert right(region), "and the holder has lost nothing"
    assert rest.size == 35 * MIB


def test_two_borrowers_of_one_owner_do_not_play_ping_pong(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY, pool(lending={"maxPerGPU": "8Mi"}))
    held = node.take_all_but(2, 0) + node.take_all_but(3, 0)
    one, two = node.connect(0), node.connect(0)
    regions = [stored(one, 6 * MIB), stored(two, 4 * MIB)]
    node.settle()
    moved = node.on_loop(node.agent.figures.moved_bytes.total)
    assert moved > 0, "the second took its fair share from the first"

    def rounds() -> int:
        return sum(not node.agent.steward.round().empty for _ in range(1000))

    assert node.on_loop(rounds) == 0
    assert node.on_loop(node.agent.figures.moved_bytes.total) == moved
    assert all(right(region) for region in regions)
    node.outsider.release(held)


def test_headroom_comes_back_in_milliseconds_when_an_outsider_takes_memory_in_steps(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(SMALL, pool(lending={"headroom": "4Mi"}))
    region = stored(node.connect(0), 24 * MIB)
    node.until(lambda a: all(c.state.value == "clean" for c in a.ledger.chunks()))
    lent = node.lent(1)
    held = [node.take(1, node.memory(1).free - 4 * MIB)]
    waits = []
    for _ in range(lent // MIB - 1):
        held.append(node.take(1, MIB))
        began = time.monotonic()
        until(lambda: node.memory(1).free >= 4 * MIB)
        waits.append(time.monotonic() - began)
    waits.sort()
    assert waits[len(waits) // 2] < 0.03, waits
    until(lambda: node.on_loop(lambda: node.agent.figures.shortfall_seconds.get(node.gpus[1], 0.0)) > 0)
    short = node.on_loop(lambda: node.agent.figures.shortfall_seconds[node.gpus[1]])
    assert short < sum(waits) + 0.02 * len(waits)
    assert node.on_loop(lambda: dict(node.agent.figures.shortfall_seconds)).keys() == {node.gpus[1]}
    assert right(region)
    node.outsider.release(held)


def test_a_share_takes_back_what_is_lent_and_has_what_a_static_partition_has(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    owner = node.connect(1)
    share = owner.share(14 * MIB)
    client = node.connect(0)
    region, rest = stored(client, 3 * MIB), client.region(27 * MIB)
    assert node.lent(1) > 0
    share.grow(14 * MIB)
    assert (share.local, rest.size) == (14 * MIB, 27 * MIB)
    assert right(region)
    share.shrink(0)
    node.until(lambda a: a.ledger.lent[node.gpus[1]] > 0, saying="what the owner gives back is lent again")
    share.close()


def test_a_link_matrix_without_a_path_is_never_lent_over(make_node: Callable[..., Node]) -> None:
    from ema_driver.sim.config import LinkOverride

    none = tuple(LinkOverride(source=s, target=0, kind="none") for s in (1, 2))
    node = make_node(sim(links=none))
    region = stored(node.connect(0), 6 * MIB)
    assert (node.lent(1), node.lent(2), node.lent(3)) == (0, 0, 6 * MIB)
    assert right(region)
