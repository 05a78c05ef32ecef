"""Reclaim: the lender has its bytes, the borrower has its data, whatever the borrower does."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest

import ema
from ema_agent import moves
from ema_agent.lease import Chunk
from ema_agent.own_share import OwnShare
from ema_core import wire
from ema_core.ids import Place
from ema_driver.errors import DriverError, NotMapped, OutOfMemory
from ema_driver.protocol import Handle
from ema_driver.sim import faults
from nodes import MIB, TINY, Borrower, Node, pattern, until

SIZE = 12 * MIB
"""Borrowed from three neighbours."""


def empty_a_lender(node: Node, gpu: int = 1) -> None:
    """Somebody else takes a GPU's memory in steps until nothing can be lent from it."""
    assert node.lent(gpu) > 0
    held = node.take_all_but(gpu, 2 * MIB)
    until(lambda: node.lent(gpu) == 0, saying="the lender has everything back")
    node.settle()
    assert node.memory(gpu).free >= 2 * MIB, "headroom"
    node.outsider.release(held)


def goes_on(borrower: Borrower) -> None:
    made = borrower.ask("made")
    until(lambda: borrower.ask("made") > made, saying="the program goes on")


def test_what_is_stored_is_fetched(node: Node) -> None:
    client = node.connect(0)
    region = client.region(4 * MIB)
    data = pattern(1, 4 * MIB)
    region.store(data, at=0)
    back = bytearray(4 * MIB)
    region.fetch(0, back)
    assert back == data


@pytest.mark.parametrize("clean", [True, False])
def test_reclaimed_bytes_are_right_afterwards(node: Node, clean: bool) -> None:
    borrower = node.borrower(0)
    assert borrower.ask("region", SIZE) == 0
    if not clean:
        node.never_clean()
    borrower.ask("fill", 0, 1)
    if clean:
        node.all_clean()
    empty_a_lender(node)
    assert borrower.ask("check", 0, 1) == []
    kinds = {r.clean for r in node.on_loop(lambda: list(node.agent.figures.recent))}
    assert kinds == {clean}


def test_a_lender_has_its_bytes_before_the_copies_in_host_memory_are_mapped(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    owner, client = node.connect(1), node.connect(0)
    share = owner.share(14 * MIB)
    region = client.region(12 * MIB)
    data = pattern(1, 12 * MIB)
    region.store(data, at=0)
    assert node.lent(1) > 0
    node.all_clean()
    goes_on, appear = threading.Event(), node.agent.backing.appear

    def wait(chunks: Sequence[Chunk]) -> DriverError | None:
        assert goes_on.wait(10.0)
        return appear(chunks)

    node.agent.backing.appear = wait  # type: ignore[method-assign]
    try:
        share.grow(14 * MIB)
    finally:
        goes_on.set()
    back = bytearray(12 * MIB)
    region.fetch(0, back)
    assert back == data


class LookingAtAddresses:
    """Has a client's simulated streams look at addresses when copies are queued, as CUDA does."""

    def __init__(self, node: Node) -> None:
        (self.session,) = [s for s in node.agent.sessions.values() if s.copies.programs]
        self.refused = 0
        for stream in self.session.copies.streams.values():
            stream.enqueue = partial(self._look, stream.enqueue)  # type: ignore[assignment,method-assign]
            stream.instantiate = partial(self._look, stream.instantiate)  # type: ignore[assignment,method-assign]
        for program in self.session.copies.programs.values():
            for graph in program.graphs:
                graph.launch = partial(self._look, graph.launch)  # type: ignore[assignment,method-assign]

    def _look(self, queue: Callable[..., object], *arguments: object) -> object:
        if all(c.mapped for c in self.session.lease.chunks()):
            return queue(*arguments)
        self.refused += 1
        raise NotMapped("nothing is mapped")


def test_what_is_started_while_memory_is_swapped_starts_when_it_is_there(make_node: Callable[..., Node]) -> None:
    node = make_node(TINY)
    owner, client = node.connect(1), node.connect(0)
    share, region = owner.share(14 * MIB), client.region(12 * MIB)
    data = pattern(1, 12 * MIB)
    region.store(data, at=0)
    window = client.window(4, MIB)
    program = client.program([region.step(window[i], 2 * i * MIB) for i in range(3)])
    node.all_clean()
    streams = node.on_loop(lambda: LookingAtAddresses(node))
    goes_on, appear = threading.Event(), node.agent.backing.appear

    def wait(chunks: Sequence[Chunk]) -> DriverError | None:
        assert goes_on.wait(10.0)
        return appear(chunks)

    node.agent.backing.appear = wait  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        try:
            share.grow(14 * MIB)
            run = program.start()
            fetched = region.fetch(11 * MIB, window[3])
            made = threads.submit(lambda: client.program([region.step(window[3], 4 * MIB)]))
            until(lambda: streams.refused > 10, saying="they are tried again")
            assert not any((window[0].full, window[3].full, made.done()))
        finally:
            goes_on.set()
        run.wait(10.0)
        fetched.wait(10.0)
        assert [bytes(window[i].wait(10.0) or b"") for i in range(3)] == [data[2 * i * MIB :][:MIB] for i in range(3)]
        assert bytes(window[3].wait(10.0) or b"") == data[11 * MIB :]
        window[3].release()
        made.result(10.0).start().wait(10.0)
        assert bytes(window[3].wait(10.0) or b"") == data[4 * MIB :][:MIB]


def test_a_run_that_waits_for_memory_that_is_lost_is_refused(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "LANDING", 0.3)
    node = make_node(TINY)
    owner, client = node.connect(1), node.connect(0)
    share, region = owner.share(14 * MIB), client.region(12 * MIB)
    region.store(pattern(1, 12 * MIB), at=0)
    window = client.window(2, MIB)
    program = client.program([region.step(window[0], i * MIB) for i in range(12)])
    node.all_clean()
    streams = node.on_loop(lambda: LookingAtAddresses(node))
    node.observer.inject(faults.RefusedMapping(place=-1))
    share.grow(14 * MIB)
    run = program.start()
    with pytest.raises(ema.DataLost):
        run.wait(10.0)
    assert streams.refused > 0
    assert not window[0].full
    node.observer.clear(faults.RefusedMapping(place=-1))
    program.close()
    region.close()
    node.until(lambda a: not any(s.copies._under_way for s in a.sessions.values()))


def test_a_share_grows_though_somebody_took_what_was_free_just_before(node: Node) -> None:
    owner, client = node.connect(1), node.connect(0)
    share = owner.share(node.memory(1).total)
    share.grow(MIB)
    region = client.region(SIZE)
    region.store(pattern(1, SIZE), at=0)
    node.settle()
    wanted = MIB + node.lent(1)
    assert wanted > MIB
    taken = node.take_what_is_free(1)
    share.grow(wanted, timeout=10.0)
    assert share.local == wanted
    node.outsider.release([taken])
    back = bytearray(SIZE)
    region.fetch(0, back)
    assert back == pattern(1, SIZE)


def test_a_share_whose_memory_goes_between_answer_and_mapping_asks_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = node.connect(1)
    share, make, tries = owner.share(4 * MIB), owner.driver.create_many, []

    def create_many(place: Place, size: int, count: int) -> Sequence[Handle]:
        tries.append(count)
        if len(tries) < 3:
            raise OutOfMemory(place, size, 0)
        return make(place, size, count)

    monkeypatch.setattr(owner.driver, "create_many", create_many)
    share.grow(2 * MIB, timeout=5.0)
    assert (share.local, len(tries)) == (2 * MIB, 3)
    tries[:] = []
    with pytest.raises(ema.OutOfMemory):
        share.grow(4 * MIB, timeout=0.0)
    assert (share.local, len(tries)) == (2 * MIB, 1)
    share.close()


def test_what_a_share_has_mapped_is_in_use_before_a_reading_shows_it(node: Node) -> None:
    gpu = node.gpus[1]

    def during_a_reading() -> tuple[int, int, int]:
        it = node.agent.node
        quiet, memory, line = it.quiet(), node.observer.memory(), Mock()
        share = OwnShare(gpu, it, line)
        share.grow(wire.GrowShare(1, 4 * MIB, 1.0))
        share.waiters.clear()  # it has been answered
        promised = it.used(gpu)
        share.mapped_is(wire.ShareIs(4 * MIB))
        mapped = it.used(gpu)
        it.take(memory, quiet)
        believed = it.used(gpu)
        share.end()
        it.observe()
        return promised, mapped, believed

    used = node.on_loop(during_a_reading)
    assert used == (4 * MIB,) * 3
    assert node.on_loop(lambda: node.agent.node.used(gpu)) == 0


def test_a_borrower_whose_program_runs_sees_no_wrong_byte_while_every_lender_takes_its_memory(node: Node) -> None:
    borrower = node.borrower(0)
    borrower.ask("region", SIZE)
    borrower.ask("fill", 0, 1)
    borrower.ask("run", 0, 1)
    for gpu in (1, 2, 3, 1):
        if node.lent(gpu):
            empty_a_lender(node, gpu)
        goes_on(borrower)
    steps, wrong = borrower.ask("halt")
    assert (steps > 0, wrong) == (True, 0)
    assert borrower.ask("check", 0, 1) == []


def silence(borrower: Borrower, how: str) -> None:
    if how == "stopped":
        borrower.ask("run", 0, 1)
        until(lambda: borrower.ask("made") > 2)
        borrower.stop()
    elif how == "hung":
        borrower.ask("hang", 0)
    elif how == "killed":
        borrower.ask("run", 0, 1)
        until(lambda: borrower.ask("made") > 2)
        borrower.kill()


@pytest.mark.parametrize("how", ["stopped", "hung", "killed"])
def test_reclaim_does_not_wait_for_a_borrower(node: Node, how: str) -> None:
    borrower, other = node.borrower(0), node.borrower(2)
    borrower.ask("region", SIZE)
    borrower.ask("fill", 0, 1)
    other.ask("region", SIZE)
    other.ask("fill", 0, 2)
    silence(borrower, how)
    empty_a_lender(node)
    assert other.ask("check", 0, 2) == []
    if how == "stopped":
        borrower.go_on()
        assert borrower.ask("halt")[1] == 0
        assert borrower.ask("check", 0, 1) == []
    elif how == "hung":
        borrower.kill()
