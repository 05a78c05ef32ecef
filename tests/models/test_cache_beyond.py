"""A cache beyond its local budget: equal to transformers' own, whatever is done with it, and its failures."""

import copy
import random
import signal
from collections.abc import Callable, Iterator
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
from client.test_failures import POOL, SIM, ema_up
from ema.channel import Channel
from ema.torch.memory import device_of
from ema.torch.poison import Poison
from ema.transformers import ElasticCache
from ema.transformers import beyond as beyond_module
from ema.transformers.budget import Size, plan
from ema.transformers.rows import first, pack, rows_of, views_of
from ema.transformers.slots import slots_for
from ema_driver.sim.faults import LostGpu
from models.test_cache import CACHE, equal, go_on, prompt_of, same, tensors
from models.test_stream_failures import interrupt
from nodes import MIB, Node, node, pool, sim, until

torch.set_num_threads(1)
ROWS = 2


def model_of(client: ema.Pool, config: Any = transformers.LlamaConfig, layers: int = 8) -> Any:  # noqa: ANN401
    """One whose slots are not much more than its tokens, whatever the granularity."""
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(
        config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16 if client.granularity < MIB else 512,
            max_position_embeddings=512,
        )
    ).eval()
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made.to(device_of(client)).requires_grad_(False)


def per_token(model: Any, rows: int = ROWS) -> int:  # noqa: ANN401
    """Bytes of a token in all layers."""
    c = model.config
    width = c.head_dim if getattr(c, "head_dim", None) else c.hidden_size // c.num_attention_heads
    return c.num_hidden_layers * 2 * c.num_key_value_heads * width * 4 * rows


def budget(client: ema.Pool, model: Any, tokens: int, rows: int = ROWS) -> int:  # noqa: ANN401
    """Room for so many tokens beside slots that are nearly empty."""
    return 4 * client.granularity + tokens * per_token(model, rows)


def device_of_cache(cache: ElasticCache) -> torch.device:
    return device_of(cache._pool)


def prompt_of_model(model: Any, tokens: int = 12) -> torch.Tensor:  # noqa: ANN401
    made = torch.randint(1, 64, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))
    return made.to(model.device)


def step(model: Any, cache: Any, rows: int, tokens: int = 1) -> torch.Tensor:  # noqa: ANN401
    """One call of the model, with tokens that depend on how many there were before; its logits."""
    start = cache.get_seq_length()
    given = (torch.arange(start, start + tokens) % 63 + 1).expand(rows, tokens).to(model.device)
    with torch.no_grad():
        logits: torch.Tensor = model(given, **{CACHE: cache}).logits
    return logits


def count(patch: pytest.MonkeyPatch, of: type, name: str, calls: list[int]) -> None:
    call = getattr(of, name)

    def counted(*given: Any, **named: Any) -> Any:  # noqa: ANN401
        calls[0] += 1
        return call(*given, **named)

    patch.setattr(of, name, counted)


def tries(action: Callable[[], object]) -> bool:
    """Whether there was memory for it."""
    try:
        action()
    except ema.PoolFull:
        return False
    return True


class Watched(ElasticCache):
    """Looks after every update of a layer whether the budget holds."""

    def update(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        found, now = super().update(*given, **named), self.report
        assert self._local is not None
        assert now.local_bytes + now.slot_bytes <= self._local
        return found


Budgeted = tuple[Any, Any, Any]


@pytest.fixture
def budgeted(client: ema.Pool) -> Iterator[Budgeted]:
    """A model, transformers' own cache, and one with a small budget."""
    model = model_of(client)
    plain = transformers.DynamicCache(config=model.config)
    with Watched(model.config, client, local=budget(client, model, 24)) as cache:
        yield model, plain, cache


CONFIGS = [transformers.LlamaConfig, transformers.Qwen3Config]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("layers", [2, 5, 8])
def test_the_same_tokens_and_logits(client: ema.Pool, config: Any, layers: int) -> None:  # noqa: ANN401
    model, prompt = model_of(client, config, layers), prompt_of(client)
    plain = transformers.DynamicCache(config=model.config)
    with Watched(model.config, client, local=budget(client, model, 24)) as cache:
        mine = its = prompt
        for _ in range(3):
            found, wanted = go_on(model, mine, cache, 12), go_on(model, its, plain, 12)
            same(found, wanted)
            mine, its = found.sequences, wanted.sequences
        assert cache.report.remote_tokens > 0
        equal(tensors(cache), tensors(plain))
        assert cache.nbytes == per_token(model) * cache.get_seq_length()


def test_between_two_growths_a_call_of_the_model_is_one_message(
    budgeted: Budgeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, cache = budgeted
    prompt = prompt_of_model(model)
    its = go_on(model, prompt, plain, 60)
    filled, grown, told = [0], [0], [0]
    count(monkeypatch, beyond_module.Beyond, "_fill_slots", filled)
    count(monkeypatch, beyond_module.Beyond, "reserve", grown)
    count(monkeypatch, Channel, "send", told)
    same(go_on(model, prompt, cache, 60), its)
    assert 1 <= grown[0] <= 60 / 4
    assert filled[0] <= grown[0]
    before = cache.report
    while True:  # to just after a growth
        step(model, cache, ROWS)
        if cache.report.remote_tokens > before.remote_tokens:
            break
    step(model, cache, ROWS)
    for _ in range(3):
        told[0] = filled[0] = grown[0] = 0
        step(model, cache, ROWS)
        assert (told[0], filled[0], grown[0]) == (1, 0, 0)
    now = cache.report
    assert now.remote_tokens + now.local_bytes // per_token(model) == now.tokens
    assert now.remote_bytes == now.fetched_bytes == now.remote_tokens * per_token(model)
    assert 0 < now.fetch_seconds < 1
    assert now.exposed_wait >= 0


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_a_prompt_in_chunks_of_any_size(budgeted: Budgeted, chunk: int) -> None:
    model, plain, cache = budgeted
    for part in prompt_of_model(model, tokens=75).split(chunk, 1):
        for one in (cache, plain):
            with torch.no_grad():
                one.logits = model(part, **{CACHE: one}).logits
        assert torch.equal(cache.logits, plain.logits)
    assert cache.report.remote_tokens > 40
    equal(tensors(cache), tensors(plain))


def test_a_prompt_that_is_beyond_at_once(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    prompt = prompt_of_model(model, tokens=64)
    for _ in range(2):
        same(go_on(model, prompt, cache, 4), go_on(model, prompt, plain, 4))
        equal(tensors(cache), tensors(plain))
        cache.reset()
        plain.reset()
        assert cache.report.remote_tokens == cache.nbytes == cache.report.slot_bytes == 0


def test_parked_and_resumed(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    mine = its = prompt_of_model(model, tokens=40)
    for droppable in (False, True, False):
        found, wanted = go_on(model, mine, cache, 8), go_on(model, its, plain, 8)
        same(found, wanted)
        mine, its = found.sequences, wanted.sequences
        held, far = cache.nbytes, cache.report.remote_tokens
        assert far
        cache.park(droppable=droppable)
        now = cache.report
        assert (now.local_bytes, now.slot_bytes, now.remote_bytes, cache.nbytes) == (0, 0, held, held)
        with pytest.raises(ema.InUse):
            cache.layers  # noqa: B018
        cache.resume()
        now = cache.report
        assert now.remote_tokens == far
        assert now.local_bytes == held - far * per_token(model)
    equal(tensors(cache), tensors(plain))


def test_slots_are_all_the_memory_that_it_takes_beside_torchs_own(torch_node: Node) -> None:
    torch_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as client:
        model, free = model_of(client), torch_node.memory(0).free
        with Watched(model.config, client, local=budget(client, model, 24)) as cache:
            taken = []
            for tokens in (40, 1, 1, 10, 1, 1, 6, 1, 1):
                step(model, cache, ROWS, tokens)
                taken.append(cache.report.slot_bytes)
                assert taken[-1] == free - torch_node.memory(0).free
            assert taken[0] < taken[1] < taken[-1]
            assert torch_node.lent(1) + torch_node.lent(2) >= cache.report.remote_bytes
            cache.park()
            assert torch_node.memory(0).free == free
            cache.resume()
            step(model, cache, ROWS)
            assert cache.report.slot_bytes
        torch_node.until(lambda a: len(a.sessions) == 1, saying="its connection has ended")
        assert torch_node.memory(0).free == free


def test_two_caches_take_turns(client: ema.Pool) -> None:
    model = model_of(client)
    told = [prompt_of(client, rows, 30 + rows) for rows in (1, 2)]
    plain = [transformers.DynamicCache(config=model.config) for _ in told]
    caches = [Watched(model.config, client, local=budget(client, model, 24, n + 1)) for n in range(2)]
    for _ in range(3):
        for n, cache in enumerate(caches):
            found, wanted = go_on(model, told[n], cache), go_on(model, told[n], plain[n])
            same(found, wanted)
            told[n] = wanted.sequences
            assert cache.report.remote_tokens
    for cache in caches:
        cache.close()


# --- what is not one token after the other ---


def test_beams(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    cache._local *= 2
    prompt = prompt_of_model(model, tokens=20)
    found, wanted = (go_on(model, prompt, c, 30, num_beams=3, output_scores=True) for c in (cache, plain))
    assert torch.equal(found.sequences, wanted.sequences)
    assert cache.report.remote_tokens
    equal(tensors(cache), tensors(plain))


def test_sequences_are_selected_and_repeated(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    cache._local *= 2
    prompt = prompt_of_model(model, tokens=40)
    for one in (cache, plain):
        go_on(model, prompt, one, 5)
        one.batch_repeat_interleave(2)
        step(model, one, 4)
        one.reorder_cache(torch.tensor([3, 2, 1, 1], device=prompt.device))
        for _ in range(30):
            step(model, one, 4)
        one.reorder_cache(torch.tensor([1, 0, 3, 2], device=prompt.device))
        one.batch_select_indices(torch.tensor([0, 3], device=prompt.device))
        for _ in range(20):
            step(model, one, 2)
    assert len(cache.layers[0].rows) > 1
    assert cache.nbytes == sum(t.nbytes for t in tensors(plain))
    equal(tensors(cache), tensors(plain))
    for one in (cache, plain):
        one.crop(-(one.get_seq_length() - 5))
        assert one.get_seq_length() == 5
        for _ in range(60):
            step(model, one, 2)
    equal(tensors(cache), tensors(plain))


def test_repeated_sequences_that_do_not_fit_are_moved(client: ema.Pool) -> None:
    model, plain = model_of(client), transformers.DynamicCache(config=model_of(client).config)
    with ElasticCache(model.config, client, local=budget(client, model, 20)) as cache:
        for one in (cache, plain):
            go_on(model, prompt_of(client, tokens=15), one, 3)
            one.batch_repeat_interleave(3)
        now = cache.report
        assert now.remote_tokens
        assert now.local_bytes <= budget(client, model, 20)
        for one in (cache, plain):
            step(model, one, 6)
        equal(tensors(cache), tensors(plain))


@pytest.mark.parametrize("removed", [1, 3, 20, 45, 50])
def test_crops(budgeted: Budgeted, removed: int) -> None:
    model, plain, cache = budgeted
    for one in (cache, plain):
        go_on(model, prompt_of_model(model, tokens=40), one, 11)
        for _ in range(2):
            one.crop(-removed)
            with torch.no_grad():
                model(prompt_of_model(model, tokens=removed), **{CACHE: one})
        step(model, one, 2)
        assert one.get_seq_length() == 51
    equal(tensors(cache), tensors(plain))


def test_tokens_that_are_looked_up_are_cropped_where_wrong(client: ema.Pool) -> None:
    model, prompt = model_of(client), prompt_of(client, 1, 30)
    plain = transformers.DynamicCache(config=model.config)
    with Watched(model.config, client, local=budget(client, model, 20, 1)) as cache:
        found, wanted = (go_on(model, prompt, c, 40, prompt_lookup_num_tokens=4) for c in (cache, plain))
        assert torch.equal(found.sequences, wanted.sequences)
        assert cache.report.remote_tokens
        equal(tensors(cache), tensors(plain))


def test_a_copy_has_the_same_tokens_and_the_same_budget(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    prompt = prompt_of_model(model, tokens=50)
    go_on(model, prompt, cache, 3)
    with copy.deepcopy(cache) as twin:
        now = twin.report
        assert now.remote_tokens
        assert now.local_bytes + now.slot_bytes <= twin._local
        cache.reset()
        go_on(model, prompt, plain, 3)
        equal(tensors(twin), tensors(plain))
        step(model, twin, 2)


def test_a_layer_that_is_read_and_one_that_is_set(budgeted: Budgeted) -> None:
    model, plain, cache = budgeted
    for one in (cache, plain):
        go_on(model, prompt_of_model(model, tokens=50), one, 3)
        layer = one.layers[2]
        layer.keys = layer.keys.flip(0)
        layer.values = layer.values.flip(0)
        step(model, one, 2)
    assert {layer.far for layer in cache.layers} == {cache.report.remote_tokens}
    equal(tensors(cache), tensors(plain))
    with torch.inference_mode():
        step(model, cache, 2)
    step(model, plain, 2)
    step(model, cache, 2)
    step(model, plain, 2)
    equal(tensors(cache), tensors(plain))


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("tokens", [14, 50])
def test_a_call_that_ends_in_the_middle(budgeted: Budgeted, at: int, tokens: int) -> None:
    model, plain, cache = budgeted

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    for one in (cache, plain):
        go_on(model, prompt_of_model(model, tokens=tokens), one, 3)
        for _ in range(5):
            hook = model.model.layers[at].mlp.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="middle"):
                step(model, one, 2)
            hook.remove()
            lengths = [one.get_seq_length(i) for i in range(len(one))]
            assert lengths == [lengths[-1] + (i <= at) for i in range(len(one))] or at == 4
            for layer in one.layers:
                if layer.get_seq_length() > min(lengths):
                    layer.crop(-1)
            step(model, one, 2)
    equal(tensors(cache), tensors(plain))


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


# --- what cannot be ---


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
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "sim.yaml").write_text(SIM)
    agent = ema_up(tmp_path)
    try:
        with ema.connect(tmp_path / "client.sock", gpu=0, timeout=30.0) as client:
            model = model_of(client)
            prompt, local = prompt_of(client, tokens=40), budget(client, model, 24)
            wanted = go_on(model, prompt, transformers.DynamicCache(config=model.config))
            with ElasticCache(model.config, client, local=local) as cache:
                go_on(model, prompt, cache)
                tokens = cache.get_seq_length()
                agent.send_signal(signal.SIGKILL)
                agent.wait(10)
                for use in (
                    lambda: step(model, cache, 2),
                    cache.park,
                    lambda: tensors(cache),
                    lambda: copy.deepcopy(cache),
                ):
                    with pytest.raises(ema.AgentLost):
                        use()
                agent = ema_up(tmp_path)
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
    finally:
        agent.terminate()
        agent.wait(20)


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
    words = [torch.zeros(1, dtype=torch.int32, device=device_of_cache(cache)) for _ in range(2)]
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
