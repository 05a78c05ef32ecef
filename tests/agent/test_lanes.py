"""Lanes: a lender's cap holds, and borrowers take turns."""

import time
from collections.abc import Callable

import pytest

from ema_agent.lanes import BURST, Lanes
from ema_core.ids import HOST, GpuId, LeaseId, Place
from ema_driver.errors import NotMapped
from nodes import MIB, TINY, Node, pattern, pool

A, B = GpuId(Place("GPU-a")), GpuId(Place("GPU-b"))
ONE, TWO, THREE = LeaseId("one"), LeaseId("two"), LeaseId("three")


class Bench:
    """Lanes on a clock that moves when it is told to."""

    def __init__(self, **caps: int) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.started: list[tuple[float, str]] = []
        self.lanes = Lanes(lambda: self.now, lambda delay, what: self.timers.append((self.now + delay, what)))
        self.lanes.caps = {Place(f"GPU-{name}"): cap for name, cap in caps.items()}

    def submit(self, lease: LeaseId, size: int, place: Place = A) -> None:
        self.lanes.submit(lease, {place: size}, lambda: self.started.append((self.now, lease)))

    def run(self, until: float) -> None:
        while self.timers and min(t for t, _ in self.timers) <= until:
            self.timers.sort(key=lambda t: t[0])
            self.now, what = self.timers.pop(0)
            what()
        self.now = until


def test_without_a_cap_a_run_starts_at_once() -> None:
    bench = Bench(b=1000)
    for _ in range(50):
        bench.submit(ONE, 10**9)
        bench.submit(TWO, 10**9, HOST)
    assert len(bench.started) == 100
    assert not bench.timers


@pytest.mark.parametrize("cap", [0, 10**6])
def test_a_run_whose_memory_is_being_swapped_waits_and_with_it_those_behind_it(cap: int) -> None:
    bench = Bench(**({"a": cap} if cap else {}))
    swapping, tries = True, 0

    def start() -> None:
        nonlocal tries
        tries += 1
        if swapping:
            raise NotMapped("nothing is mapped")
        bench.started.append((bench.now, ONE))

    bench.lanes.submit(ONE, {A: 10}, start)
    bench.lanes.submit(ONE, {A: 10}, lambda: bench.started.append((bench.now, "behind")))
    bench.submit(TWO, 10)
    assert [who for _, who in bench.started] == [TWO]
    bench.run(0.05)
    assert [who for _, who in bench.started] == [TWO]
    assert 10 < tries < 100
    swapping = False
    bench.run(0.1)
    assert [who for _, who in bench.started] == [TWO, ONE, "behind"]
    assert not bench.timers
    bench.submit(ONE, 10)
    assert len(bench.started) == 4


def test_the_cap_holds_over_any_time() -> None:
    bench = Bench(a=1000)
    for _ in range(100):
        bench.submit(ONE, 100)
    bench.run(5.0)
    assert 49 <= len(bench.started) <= 52
    for at, _ in bench.started:
        by_then = sum(100 for t, _ in bench.started if t <= at)
        assert by_then <= 1000 * (at + BURST) + 100


def test_a_run_larger_than_a_bucket_is_served() -> None:
    bench = Bench(a=1000)
    bench.submit(ONE, 5000)
    bench.submit(ONE, 10)
    assert len(bench.started) == 1
    bench.run(4.9)
    assert len(bench.started) == 1
    bench.run(5.1)
    assert len(bench.started) == 2


def test_borrowers_take_turns_however_much_one_has_queued() -> None:
    bench = Bench(a=1000)
    for _ in range(30):
        bench.submit(ONE, 100)
    for _ in range(5):
        bench.submit(TWO, 100)
        bench.submit(THREE, 100)
    bench.run(2.0)
    first = [lease for _, lease in bench.started[1:16]]
    assert sorted(first) == sorted([ONE, TWO, THREE] * 5)


def test_lenders_do_not_wait_for_each_other() -> None:
    bench = Bench(a=1000, b=1000)
    for _ in range(10):
        bench.submit(ONE, 500, A)
    bench.submit(TWO, 10, B)
    assert (0.0, TWO) in bench.started


def test_runs_of_one_borrower_keep_their_order() -> None:
    bench = Bench(a=1000)
    order: list[int] = []
    for number in range(6):
        place = A if number % 2 == 0 else HOST
        bench.lanes.submit(ONE, {place: 500}, lambda number=number: order.append(number))  # type: ignore[misc]
    bench.run(10.0)
    assert order == list(range(6))


def test_what_a_borrower_that_is_gone_has_queued_is_not_started() -> None:
    bench = Bench(a=1000)
    for _ in range(5):
        bench.submit(ONE, 500)
    bench.submit(TWO, 500)
    bench.lanes.forget(ONE)
    bench.run(10.0)
    assert [lease for _, lease in bench.started] == [ONE, TWO]


def test_a_cap_that_is_lifted_lets_everything_go() -> None:
    bench = Bench(a=1000)
    for _ in range(5):
        bench.submit(ONE, 5000)
    bench.lanes.caps = {}
    bench.run(6.0)
    assert len(bench.started) == 5


def test_traffic_of_a_capped_lender_stays_under_its_cap(make_node: Callable[..., Node]) -> None:
    cap = 8 * MIB
    node = make_node(TINY, pool(lending={"maxTraffic": "8Mi"}, reclaim={"spillTo": ["Drop"]}))
    client = node.connect(0)
    region = client.region(3 * MIB, droppable=True)  # a MiB on each of three lenders
    began = time.monotonic()
    region.store(pattern(1, 3 * MIB), at=0)
    back = bytearray(3 * MIB)
    region.fetch(0, back)
    took = time.monotonic() - began
    assert back == pattern(1, 3 * MIB)
    per_lender = 2 * MIB
    assert took >= (per_lender - cap * BURST) / cap - 0.1
    assert took < 4 * per_lender / cap, "and not far under it"
