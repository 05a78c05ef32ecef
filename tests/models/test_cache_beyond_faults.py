"""A cache beyond its local budget when it is interrupted, when nobody lends, and when what was lent is gone."""

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers

import ema
from client.test_droppable import squeeze
from ema.torch.poison import Poison
from ema.transformers import ElasticCache
from ema.transformers.budget import Size, plan
from ema.transformers.rows import first, pack, rows_of, views_of
from ema.transformers.slots import slots_for
from ema_core import wire
from ema_driver.sim.faults import LostGpu
from models.budgets import budget, model_of, per_token, prompt_of_model, small_budget, step, tries
from models.caches import CACHE, equal, go_on, prompt_of, same, tensors
from models.interrupts import interrupt
from nodes import node, pool, sim, until
from up import Up

torch.set_num_threads(1)

Budgeted = tuple[Any, Any, Any]


@pytest.fixture
def budgeted(client: ema.Pool) -> Iterator[Budgeted]:
    """A model, transformers' own cache, and one with a small budget."""
    with small_budget(client) as found:
        yield found


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # just made when interrupted: collected later
def test_interrupted_anywhere(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    if client.granularity > 4096:
        pytest.skip("where the CPU waits is where it can be interrupted")
    dice, model = random.Random(7), model_of(client, layers=4)
    states = torch.randn(2, 2, 400, 16)
    with ElasticCache(model.config, client, local=budget(client, model, 40)) as cache:

        def add(tokens: int) -> None:
            at = [cache.get_seq_length(i) for i in range(4)]
            for i in range(4):
                new = states[..., at[i] : at[i] + tokens, :]
                cache.update(new.add(i), new.sub(i), i)

        def check() -> None:
            for i, layer in enumerate(cache.layers):
                kept = states[..., : layer.get_seq_length(), :]
                if layer.get_seq_length():
                    equal([*layer.whole()], [kept.add(i), kept.sub(i)])

        connect, ready = client.another, list[ema.Pool]()
        monkeypatch.setattr(client, "another", ready.pop)  # connecting itself is not in question here
        for after in range(300):
            ready[:] = ready or [connect()]
            short = min(cache.get_seq_length(i) for i in range(4))
            for layer in cache.layers:
                if more := layer.get_seq_length() - short:
                    layer.crop(-more)
            if short > 30:
                cache.crop(20 - short)
            if after % 20 == 19:
                cache.reset()
            with interrupt(dice.choice((dice.randrange(1, 200), dice.randrange(1, 2000)))), suppress(KeyboardInterrupt):
                add(dice.choice((1, 1, 30)))
            check()
        for spare in ready:
            spare.close()


def test_too_little_even_for_the_slots(client: ema.Pool) -> None:
    model, prompt = model_of(client), prompt_of(client)
    with ElasticCache(model.config, client, local=per_token(model)) as cache:
        with pytest.raises(ema.LimitReached, match=f"local is {per_token(model)}"):
            go_on(model, prompt, cache)
        assert cache.nbytes == 0
        cache.park()  # nothing to move
        assert not cache.parked
    one = model_of(client, layers=1)
    with ElasticCache(one.config, client, local=budget(client, one, 20)) as cache:
        with pytest.raises(ema.LimitReached, match="local"):
            go_on(one, prompt, cache, 100)
        assert cache.get_seq_length() >= 20


def test_more_chunks_than_a_call_can_fetch(budgeted: Budgeted, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, cache = budgeted
    monkeypatch.setattr(wire, "MAX_COPIES", 7)
    for one in (cache, plain):
        step(model, one, 2, 20)
    for _ in range(2):
        with pytest.raises(ema.LimitReached, match=r"8 chunks of \d+ bytes; 7 are the most"):
            step(model, cache, 2, 20)
    equal(tensors(cache), tensors(plain))


def test_gradients_are_refused(budgeted: Budgeted) -> None:
    model, _, cache = budgeted
    go_on(model, prompt_of_model(model, tokens=40), cache, 3)
    before = tensors(cache)
    states = torch.zeros(2, 2, 1, model.config.head_dim, device=before[0].device, requires_grad=True)
    for _ in range(40):
        with pytest.raises(ema.BadInput, match="gradient"):
            cache.update(states, states, 0)
    equal(tensors(cache), before)


def test_compiled_around_it(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    prompt = prompt_of_model(model, tokens=40)
    try:
        with torch.no_grad():
            model(prompt, **{CACHE: plain})
            torch.compile(model, backend="eager")(prompt, **{CACHE: cache})
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(tensors(cache), tensors(plain))


@pytest.mark.parametrize("error", [ema.PoolFull, ema.LimitReached])
def test_nobody_lends(tmp_path_factory: pytest.TempPathFactory, error: type[ema.EmaError]) -> None:
    most = {"maxPerPod": "64Ki"} if error is ema.LimitReached else {}
    rules = pool(chunk="16Ki", borrowing=most, lending={"headroom": "512Ki"})
    with node(tmp_path_factory.mktemp("n"), sim(link_delays=False, granularity=4096), rules) as it:
        client = it.connect(0)
        held = squeeze(it) if error is ema.PoolFull else []
        free = it.memory(0).free
        model, prompt = model_of(client), prompt_of(client)
        plain, more = transformers.DynamicCache(config=model.config), prompt_of(client, tokens=30)
        with ElasticCache(model.config, client, local=budget(client, model, 20), timeout=0.05) as cache:
            for one in (cache, plain):
                go_on(model, prompt, one, 5)
            for _ in range(2):
                with pytest.raises(error):
                    go_on(model, more, cache)
            with pytest.raises(error):
                cache.batch_repeat_interleave(9)
            equal(tensors(cache), tensors(plain))
            it.until(lambda a: len(a.sessions) == 1, saying="its connection has ended")
            assert it.memory(0).free == free
            it.observer.release(held)
            if error is ema.PoolFull:
                until(lambda: tries(lambda: step(model, cache, 2, 30)), saying="somebody lends")
                step(model, plain, 2, 30)
                equal(tensors(cache), tensors(plain))
                held = squeeze(it)
                while tries(lambda: step(model, cache, 2, 9)):
                    step(model, plain, 2, 9)
                equal(tensors(cache), tensors(plain))
                it.observer.release(held)


def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        model = model_of(client)
        prompt, local = prompt_of(client, tokens=40), budget(client, model, 24)
        wanted = go_on(model, prompt, transformers.DynamicCache(config=model.config))
        with ElasticCache(model.config, client, local=local) as cache:
            go_on(model, prompt, cache)
            tokens = cache.get_seq_length()
            agent.kill()
            for use in (
                lambda: step(model, cache, 2),
                cache.park,
                lambda: tensors(cache),
                lambda: copy.deepcopy(cache),
            ):
                with pytest.raises(ema.AgentLost):
                    use()
            agent.start()
            beyond = cache._beyond
            assert beyond is not None
            both = (client, beyond.connection)
            until(lambda: all(c.session == 2 for c in both), within=30, saying="connected to the new agent")
            for use in (lambda: step(model, cache, 2), cache.park):
                with pytest.raises(ema.AgentLost):
                    use()
            assert cache.get_seq_length() == tokens
            cache.reset()
            same(go_on(model, prompt, cache), wanted)
            assert cache.report.remote_tokens


def test_a_gpu_that_is_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki")) as it:
        client = it.connect(0)
        it.on_loop(lambda: setattr(it.agent.cleaner, "_candidates", list))  # no copy in host memory saves it
        model = model_of(client)
        with ElasticCache(model.config, client, local=budget(client, model, 24)) as cache:
            go_on(model, prompt_of(client, tokens=40), cache)
            places = it.on_loop(lambda: {c.place for c in it.agent.ledger.chunks()})
            fault = LostGpu(gpu=[str(g) for g in it.gpus].index(min(map(str, places))))
            it.observer.inject(fault)
            try:
                for _ in range(2):
                    with pytest.raises((ema.DataLost, ema.AgentLost)):
                        step(model, cache, 2, 1)
                    with pytest.raises((ema.DataLost, ema.AgentLost)):
                        tensors(cache)
                cache.reset()
                assert cache.get_seq_length() == 0
            finally:
                it.observer.clear(fault)
            it.until(lambda a: len(a.sessions) < 2, within=30, saying="the session of the cache has ended")


def test_what_a_stream_takes_from_a_lost_agent_is_nan(budgeted: Budgeted) -> None:
    model, _, cache = budgeted
    go_on(model, prompt_of_model(model, tokens=40), cache, 3)
    step(model, cache, 2)
    slots = cache._beyond._slots
    words = [torch.zeros(1, dtype=torch.int32, device=model.device) for _ in range(2)]
    slots.poison = Poison(*words)
    assert step(model, cache, 2).isfinite().all()
    words[1].fill_(1)
    assert step(model, cache, 2).isnan().all()
    slots.poison = None


# --- its parts ---


def test_a_plan_moves_as_little_as_leaves_half_of_the_room() -> None:
    dice = random.Random(5)
    found = 0
    for _ in range(400):
        count, grain = dice.randrange(1, 9), dice.choice((1, 64, 4096))
        slots, far = slots_for(count), dice.randrange(50)
        sizes = [Size(far, far * 16, 16, dice.choice((16, 12))) for _ in range(count)]
        tokens, local = far + dice.randrange(1, 80), dice.randrange(100, 20000)
        each = sum(size.token for size in sizes)
        room = {f: local - slots * (f * 16 + grain) for f in range(far, tokens + 1)}
        fitting = [f for f, left in room.items() if 2 * each * (tokens - f) <= left]
        try:
            made = plan(sizes, tokens, local, slots, grain)
        except ema.LimitReached:
            assert not fitting
        else:
            found += 1
            assert made.far == fitting[0]
            assert made.slots % grain == 0
            assert 0 <= made.slots - slots * made.far * 16 < slots * grain
    assert 50 < found < 350


@pytest.mark.parametrize(("key", "value"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_rows_hold_every_bit(key: torch.dtype, value: torch.dtype) -> None:
    keys, values = torch.randn(3, 1, 7, 5).to(key), torch.randn(3, 2, 7, 3).to(value)
    flat = torch.cat([pack(keys[..., :4, :], values[..., :4, :]), pack(keys[..., 4:, :], values[..., 4:, :])])
    rows = rows_of(keys, values)
    assert flat.numel() == rows.size
    (found,) = views_of([rows], flat)
    equal([*found], [keys, values])
    parts = first((replace(rows, count=3), replace(rows, count=4)), 5)
    assert [p.count for p in parts] == [3, 2]
    joined = [torch.cat(pair, -2) for pair in zip(*views_of(parts, flat), strict=True)]
    equal(joined, [keys[..., :5, :], values[..., :5, :]])
