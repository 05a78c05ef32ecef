"""Agents that are killed, GPUs that are lost: what was lost is said before it can be used."""

import threading
import time
from pathlib import Path

import pytest

import ema
from ema.channel import Channel
from ema_driver.sim.faults import LostGpu
from nodes import SMALL, node, pattern, pool, sim, until
from up import Up


def test_an_agent_killed_with_9_and_started_again(tmp_path: Path) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        region, window = client.region(2 * client.chunk), client.window(1, 4096)
        share = client.share(client.chunk)
        share.grow(client.chunk)
        share.page(0)[:4] = b"mine"
        program = client.program([region.step(window[0])])
        program.start()
        window[0].wait(10.0)
        agent.kill()
        with pytest.raises(ema.AgentLost):
            window[0].wait_empty()
        with pytest.raises(ema.AgentLost):
            region.store(b"x", at=0)
        agent.start()
        until(lambda: client.session == 2, within=30, saying="connected to the new agent")
        with pytest.raises(ema.AgentLost):
            program.start()
        again = client.region(2 * client.chunk, timeout=10.0)
        again.store(pattern(1, 4096), at=7)
        again.fetch(7, into=window[0])
        assert bytes(window[0].wait(10.0) or b"") == pattern(1, 4096)
        assert bytes(share.page(0)[:4]) == b"mine"


def test_a_lost_gpu_costs_its_regions_and_no_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki")) as it:
        client = it.connect(0)
        it.never_clean()
        regions = [client.region(client.chunk) for _ in range(6)]
        for number, region in enumerate(regions):
            region.store(pattern(number, client.chunk), at=0)
        places = it.on_loop(lambda: {c.region.number: c.place for c in it.agent.ledger.chunks()})
        gone = places[regions[0].number]
        assert any(place != gone for place in places.values())
        window = client.window(1, 4096)
        fault = LostGpu(gpu=[str(g) for g in it.gpus].index(gone))
        it.observer.inject(fault)
        try:
            until(lambda: client._lost, saying="the client was told")
            for number, region in enumerate(regions):
                if places[region.number] == gone:
                    for into in (bytearray(8), window[0]):
                        with pytest.raises(ema.DataLost) as caught:
                            region.fetch(0, into=into)
                        assert caught.value.chunks == [0]
                        assert caught.value.cause
                    with pytest.raises(ema.DataLost):
                        region.store(b"x", at=0)
                    region.close()
                else:
                    found = bytearray(client.chunk)
                    region.fetch(0, found)
                    assert found == pattern(number, client.chunk)
        finally:
            it.observer.clear(fault)


def test_a_pool_that_is_closed_while_it_connects_anew_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path, SMALL) as it:
        client = it.connect(0)
        client.window(1, 4096 * 16)
        begun, goes_on, adopt = threading.Event(), threading.Event(), client._adopt

        def slow(channel: Channel) -> None:
            begun.set()
            assert goes_on.wait(10)
            adopt(channel)

        monkeypatch.setattr(client, "_adopt", slow)
        it.stop()
        it.start()
        assert begun.wait(10)
        closing = threading.Thread(target=client.close)
        closing.start()
        time.sleep(0.05)
        goes_on.set()
        closing.join(10)
        assert not closing.is_alive()
        it.until(lambda a: not a.sessions, saying="the connection that was being made is closed")
        assert not any(t.name.startswith("ema-re") and t.is_alive() for t in threading.enumerate())
