"""A cache whose memory is taken, refused or lost, or that is interrupted: typed errors, and never a wrong token."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers

import ema
from client.test_droppable import squeeze
from ema.transformers import ElasticCache
from ema.transformers import parked as parked_module
from ema_driver.sim.faults import LostGpu
from models.caches import SIZES, equal, go_on, model_of, prompt_of, same, tensors
from models.interrupts import interrupt, lines_of
from nodes import Node, node, pool, sim, until
from up import Up


@pytest.mark.parametrize("error", [ema.PoolFull, ema.LimitReached])
def test_a_full_pool_leaves_the_cache_local(
    tmp_path_factory: pytest.TempPathFactory, error: type[ema.EmaError]
) -> None:
    config = sim(link_delays=False, granularity=4096)
    most = {"maxPerPod": "64Ki"} if error is ema.LimitReached else {}
    rules = pool(chunk="64Ki", borrowing=most, lending={"headroom": "512Ki"}, reclaim={"hostMemory": "0"})
    with node(tmp_path_factory.mktemp("n"), config, rules) as it:
        client = it.connect(0)
        held = squeeze(it) if error is ema.PoolFull else []
        free = it.memory(0).free
        states = torch.randn(1, 2, 1000, 8)
        cache = ElasticCache(transformers.LlamaConfig(**SIZES), client)
        for layer in range(3):
            cache.update(states, states, layer)
        before = tensors(cache)
        with pytest.raises(error):
            cache.park(timeout=0.1)
        assert not cache.parked
        equal(tensors(cache), before)
        it.until(lambda a: len(a.sessions) == 1, saying="its connection has ended")
        assert it.memory(0).free == free
        it.observer.release(held)
        cache.close()


def test_a_killed_agent(tmp_path: Path) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        model, prompt = model_of(client), prompt_of(client)
        plain = transformers.DynamicCache(config=model.config)
        parked, local = (ElasticCache(model.config, client) for _ in range(2))
        wanted = go_on(model, prompt, plain)
        for cache in (parked, local):
            go_on(model, prompt, cache)
        parked.park()
        agent.kill()
        with pytest.raises(ema.AgentLost):
            local.park()
        for _ in range(2):
            with pytest.raises(ema.AgentLost):
                parked.resume()
            with pytest.raises(ema.InUse):
                go_on(model, prompt, parked)
        equal(tensors(local), tensors(plain))
        agent.start()
        until(lambda: client.session == 2, within=30, saying="connected to the new agent")
        with pytest.raises(ema.AgentLost):
            parked.resume()
        local.park()
        local.resume()
        equal(tensors(local), tensors(plain))
        parked.reset()
        same(go_on(model, prompt, parked), wanted)
        parked.close()
        local.close()


def test_a_droppable_one_is_computed_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    taken = {"spillTo": ["Drop"], "hostMemory": "0"}
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(reclaim=taken, lending={"headroom": "512Ki"})) as it:
        client = it.connect(0)
        model, prompt = model_of(client), prompt_of(client)
        wanted = go_on(model, prompt, transformers.DynamicCache(config=model.config))
        cache = ElasticCache(model.config, client)
        same(go_on(model, prompt, cache), wanted)
        before = tensors(cache)
        cache.park(droppable=True)
        cache.resume()
        equal(tensors(cache), before)
        cache.park(droppable=True)
        held = squeeze(it)
        until(lambda: it.lent(1) + it.lent(2) + it.lent(3) == 0, saying="all is dropped")
        for _ in range(2):
            with pytest.raises(ema.Reclaimed):
                cache.resume()
            with pytest.raises(ema.InUse):
                go_on(model, prompt, cache)
        cache.reset()
        same(go_on(model, prompt, cache), wanted)
        it.observer.release(held)
        cache.close()


def test_no_room_to_resume(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of(client), prompt_of(client)
    cache = ElasticCache(model.config, client)
    go_on(model, prompt, cache)
    before = tensors(cache)
    cache.park()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(ema.OutOfMemory):
            cache.resume()
    assert cache.parked
    cache.resume()
    equal(tensors(cache), before)
    cache.close()


@pytest.mark.slow
def test_a_lost_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki")) as it:
        client = it.connect(0)
        it.never_clean()
        cache = ElasticCache(transformers.LlamaConfig(**SIZES), client)
        states = torch.randn(1, 2, 1000, 8)
        for layer in range(3):
            cache.update(states, states, layer)
        cache.park()
        places = it.on_loop(lambda: {c.place for c in it.agent.ledger.chunks()})
        fault = LostGpu(gpu=[str(g) for g in it.gpus].index(min(map(str, places))))
        it.observer.inject(fault)
        try:
            with pytest.raises((ema.DataLost, ema.AgentLost)):
                cache.resume()
            assert cache.parked
            with pytest.raises(ema.InUse):
                cache.get_seq_length()
            cache.reset()
            assert cache.get_seq_length() == 0
            cache.close()
        finally:
            it.observer.clear(fault)
        it.until(lambda a: len(a.sessions) < 2, within=30, saying="the session of the cache has ended")


@pytest.mark.parametrize("what", ["park", "resume"])
def test_interrupted_while_it_moves(torch_node: Node, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(parked_module, "SLOT", 4096)
    torch_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as client:
        cache = ElasticCache(transformers.LlamaConfig(**SIZES), client)
        states = torch.randn(1, 2, 1000, 8)
        for layer in range(3):
            cache.update(states, states, layer)
        before = tensors(cache)
        if what == "resume":
            cache.park()
        calls = [0]
        length = parked_module.Parked._length

        def interrupted(self: parked_module.Parked, number: int) -> int:
            calls[0] += 1
            if calls[0] == 5:
                raise KeyboardInterrupt
            return length(self, number)

        with monkeypatch.context() as patch:
            patch.setattr(parked_module.Parked, "_length", interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(cache, what)()
        assert cache.parked == (what == "resume")
        cache.park()
        cache.resume()
        equal(tensors(cache), before)
        torch_node.until(lambda a: len(a.sessions) == 1, saying="nothing but the client's own session is left")
        cache.close()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # just made when interrupted: collected later
@pytest.mark.parametrize("what", ["park", "resume"])
def test_interrupted_anywhere(torch_node: Node, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    torch_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    dice = random.Random(what)
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as client:
        cache = ElasticCache(transformers.LlamaConfig(**SIZES), client)
        states = torch.randn(1, 2, 1000, 8)
        for layer in range(3):
            cache.update(states, states, layer)
        before = tensors(cache)

        connect, ready = client.another, list[ema.Pool]()
        monkeypatch.setattr(client, "another", ready.pop)  # connecting itself is not in question here

        def prepare() -> None:
            ready[:] = ready or [connect()]
            (cache.park if what == "resume" else cache.resume)()
            ready[:] = ready or [connect()]

        prepare()
        most = lines_of(getattr(cache, what))
        for after in sorted(dice.randrange(1, most) for _ in range(25)):
            prepare()
            with interrupt(after), suppress(KeyboardInterrupt):
                getattr(cache, what)()
            cache.resume()
            equal(tensors(cache), before)
        for spare in ready:
            spare.close()
        cache.reset()
        torch_node.until(lambda a: len(a.sessions) == 1, saying="nothing but the client's own session is left")
        cache.close()
