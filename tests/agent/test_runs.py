"""Copies without a program: two may be under way, whatever their order of ending."""

import threading
import time
from collections.abc import Callable

import pytest

import ema
from ema_driver.sim import SimDriver
from nodes import KIB, MIB, SMALL, Node, pattern, pool


def test_a_run_begins_while_the_one_before_last_waits_for_its_client(node: Node) -> None:
    client = node.connect(0)
    region = client.region(2 * MIB)
    window = client.window(3, MIB)
    data = pattern(1, 2 * MIB)
    region.store(data, at=0)
    # The second copy waits for slot 0, which is released only at the end.
    slow = client.run([region.step(window[0], 0), region.step(window[0], MIB)], store=False)
    window[0].wait(5)  # the first copy is made: what is stored there now does not reach it
    region.store(window[1], 0).wait(5)
    begun = threading.Event()

    def fetch() -> None:
        region.fetch(MIB, window[2])
        begun.set()

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        assert begun.wait(5), "it waits for the run before last, though only that one is under way"
        assert not slow.done
    finally:
        assert bytes(window[0].wait(5) or b"") == data[:MIB]
        window[0].release()
        thread.join(5)
    slow.wait(5)
    assert bytes(window[0].wait(5) or b"") == data[MIB:]
    assert bytes(window[2].wait(5) or b"") == data[MIB:]


def test_waiting_beside_other_work_is_not_exposed(node: Node) -> None:
    client = node.connect(0)
    region = client.region(MIB)
    slot = client.window(1, MIB)[0]
    before = client.exposed_wait
    region.fetch(0, slot)
    slot.wait(5, needed_at=time.monotonic() + 60)
    slot.release()
    assert client.exposed_wait == before
    threading.Timer(0.05, lambda: region.fetch(0, slot)).start()
    slot.wait(5, needed_at=time.monotonic())
    assert client.exposed_wait - before >= 0.02


def test_a_run_of_more_copies_than_a_queue_takes_is_refused(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimDriver, "most_copies", 24)
    client = make_node(SMALL, pool(chunk="64Ki")).connect(0)
    region, window = client.region(25 * 64 * KIB), client.window(1, 25 * 64 * KIB)
    data = pattern(1, region.size)
    region.store(data, at=0)
    client.program([region.step(window[0])])  # a program takes more
    with pytest.raises(ema.BadInput, match="steps is more copies; expected at most 24 copies"):
        region.fetch(0, window[0]).wait(10.0)
    most = 24 * 64 * KIB
    region.fetch(0, window[0], most).wait(10.0)
    assert bytes(window[0].wait(10.0) or b"")[:most] == data[:most]
