"""Opening, closing, twice and too late; agents that go and come."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

import ema
from ema_driver.sim import SimDriver, wire
from nodes import Node, node, pool, sim, until


def test_closing_twice_and_using_what_is_closed(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(2, 4096)
    program = client.program([region.step(window[0])])
    share = client.share(client.chunk)
    for used in (window, region):
        with pytest.raises(ema.InUse):
            used.close()
    slot = window[1]
    for thing in (program, region, window, share):
        thing.close()
        thing.close()
    for call in (
        program.start,
        region.gone,
        lambda: region.fetch(0, into=bytearray(1)),
        lambda: region.store(b"x", at=0),
        lambda: region.grow(1),
        lambda: slot.view,
        slot.wait,
        slot.release,
        slot.fill,
        slot.reset,
        lambda: slot.full,
        lambda: window.handle,
        lambda: share.grow(1),
    ):
        with pytest.raises(ema.EmaError, match="closed"):
            call()
    other = client.region(client.chunk)
    with pytest.raises(ema.BadInput, match="slot"):
        other.fetch(0, into=slot)


def test_everything_says_so_after_the_pool_is_closed(shared_node: Node) -> None:
    client = ema.connect(shared_node.socket, gpu=shared_node.gpus[0])
    region, window = client.region(client.chunk), client.window(1, 4096)
    program, share = client.program([region.step(window[0])]), client.share(client.chunk)
    share.grow(client.chunk)
    ticket = program.start()
    client.close()
    client.close()
    assert not client.alive
    for call in (
        program.start,
        ticket.wait,
        lambda: ticket.done,
        lambda: region.fetch(0, into=bytearray(1)),
        lambda: client.region(1),
        lambda: client.window(1, 4096),
        lambda: client.program([]),
        lambda: client.share(client.chunk),
        lambda: share.grow(2 * client.chunk),
        window[0].wait,
        window[0].release,
    ):
        with pytest.raises(ema.EmaError):
            call()
    for thing in (program, region, window, share):
        thing.close()


def test_closing_the_pool_ends_waits(shared_node: Node) -> None:
    client = ema.connect(shared_node.socket, gpu=shared_node.gpus[0])
    window = client.window(1, 4096)
    raised: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(ema.EmaError, match="closed") as caught:
            window[0].wait()
        raised.append(caught.value)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for t in threads:
        t.start()
    until(lambda: client.measures._waiters == 3)
    client.close()
    for t in threads:
        t.join(5)
    assert len(raised) == 3


def test_as_a_context_manager(shared_node: Node) -> None:
    with pytest.raises(KeyError), ema.connect(shared_node.socket, gpu=shared_node.gpus[0]) as client:  # noqa: PT012
        client.region(client.chunk)
        raise KeyError
    assert not client.alive


def test_windows_that_come_and_go_never_run_out_of_slots(client: ema.Pool) -> None:
    old = client.window(4, 4096)
    for _ in range(300):
        new = client.window(4, 4096)
        old.close()
        old = new
    with pytest.raises(ema.InUse, match="slots"):
        client.window(1024, 4096)


def test_full_pool_limit_and_place_in_the_queue(shared_node: Node, client: ema.Pool) -> None:
    with pytest.raises(ema.LimitReached):
        client.region(client.limit + client.chunk)
    most = client.limit // client.chunk * client.chunk
    with ema.connect(shared_node.socket, gpu=shared_node.gpus[1], name="other") as other:
        taken = other.region(8 * client.chunk)
        with pytest.raises(ema.PoolFull) as caught:
            client.region(most, timeout=0.1)
        assert caught.value.position == 0
        assert client.queue_position is None
        taken.close()
    region = client.region(4 * client.chunk)
    assert region.size == 4 * client.chunk


def test_share_grows_shrinks_and_goes_beyond(shared_node: Node, client: ema.Pool) -> None:
    chunk = client.chunk
    share = client.share(4 * chunk)
    with pytest.raises(ema.InUse):
        client.share(chunk)
    client.region(chunk).store(b"x", at=0)  # makes the staging slots
    free = shared_node.memory(0).free
    share.grow(3 * chunk)
    assert (share.local, share.borrowed) == (3 * chunk, 0)
    assert free - shared_node.memory(0).free == 3 * chunk
    share.page(2)[:4] = b"mine"
    share.grow(7 * chunk)
    assert (share.local, share.borrowed) == (4 * chunk, 3 * chunk)
    assert share.beyond is not None
    share.beyond.store(b"beyond", at=0)
    assert bytes(share.page(2)[:4]) == b"mine"
    share.shrink(5 * chunk)
    found = bytearray(6)
    share.beyond.fetch(0, found)
    assert bytes(found) == b"beyond"
    assert share.borrowed == chunk
    share.shrink(2 * chunk)
    assert (share.local, share.borrowed) == (2 * chunk, 0)
    big = shared_node.observer.create(shared_node.gpus[0], shared_node.memory(0).free)
    with pytest.raises(ema.OutOfMemory):
        share.grow(4 * chunk, timeout=0.2)
    shared_node.observer.release([big])
    assert share.local == 2 * chunk
    share.close()
    assert shared_node.memory(0).free == free


def test_a_share_grows_by_hundreds_of_pages_with_few_calls(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    share = client.share(128 * client.chunk)
    assert isinstance(client.driver, SimDriver)
    calls: list[str] = []
    ask = client.driver._channel.ask

    def counted(call: wire.Call, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        calls.append(type(call).__name__)
        return ask(call, fds)

    monkeypatch.setattr(client.driver._channel, "ask", counted)
    share.grow(128 * client.chunk)
    assert calls == ["Create", "Reserve", "Map"]
    assert bytes(share.page(127)) == bytes(client.chunk)
    share.page(127)[:4] = b"mine"
    assert bytes(share.page(127)[:4]) == b"mine"
    share.shrink(client.chunk)
    share.close()


def connected(client: ema.Pool, after: int) -> bool:
    return client.session > after and client.alive


def test_the_agent_goes_and_another_comes(tmp_path_factory: pytest.TempPathFactory) -> None:
    with node(tmp_path_factory.mktemp("n"), sim(link_delays=False, granularity=4096), pool(chunk="64Ki")) as it:
        client = it.connect(0)
        region, window = client.region(client.chunk), client.window(2, 4096)
        share = client.share(2 * client.chunk)
        share.grow(client.chunk)
        share.page(0)[:4] = b"mine"
        program = client.program([region.step(window[0])])
        program.start().wait(5.0)
        window[1].fill()
        stuck = region.fetch(0, into=window[1])
        stopped, waits = threading.Event(), []

        def wait() -> None:
            with pytest.raises(ema.AgentLost) as caught:
                window[0].wait_empty()
            waits.append(caught.value)
            stopped.set()

        thread = threading.Thread(target=wait)
        thread.start()
        for round_ in range(3):
            session = client.session
            it.stop()
            until(lambda: not client.alive)
            with pytest.raises(ema.AgentLost):
                region.fetch(0, into=bytearray(1))
            with pytest.raises(ema.AgentLost):
                client.region(client.chunk)
            it.start()
            until(partial(connected, client, session), saying=f"connected again, round {round_}")
        thread.join(5)
        assert stopped.is_set()
        assert waits
        for call in (stuck.wait, program.start, lambda: region.store(b"x", at=0), lambda: window[1].wait(5.0)):
            with pytest.raises(ema.AgentLost):
                call()
        region.close()
        program.close()
        again = client.region(client.chunk)
        assert bytes(share.page(0)[:4]) == b"mine"
        window[0].reset()
        window[0].view[:] = b"b" * 4096
        again.store(window[0], at=0).wait(5.0)
        again.fetch(0, into=window[1])
        assert bytes(window[1].wait(5.0) or b"") == b"b" * 4096
        share.close()
        window.close()


def test_nobody_listens(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ema.AgentLost, match="no agent answers"):
        ema.connect(str(tmp_path_factory.mktemp("n") / "none.sock"), timeout=0.1)
