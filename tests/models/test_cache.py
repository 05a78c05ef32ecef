"""A cache on lent memory: equal to transformers' own, parked and resumed in the middle, and its failures."""

import copy
import inspect
import itertools
import pickle
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers

import ema
from client.test_droppable import squeeze
from ema.torch.memory import device_of
from ema.transformers import ElasticCache
from ema.transformers import parked as parked_module
from ema.transformers.pieces import cut
from ema_driver.sim.faults import LostGpu
from models.test_stream_failures import interrupt, lines_of
from nodes import Node, node, pool, sim, until
from up import Up

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward)
CACHE = "cache" if "cache" in FORWARD.parameters else "past_key_values"
"""What transformers calls it: newer releases warn about the older name."""
PER_TOKEN = 3 * 2 * 2 * 8 * 4
"""Bytes of one token of one sequence: layers × (K, V) × heads × width × float32."""
CONFIGS = [transformers.LlamaConfig, transformers.Qwen2Config]


def model_of(client: ema.Pool, config: Any = transformers.LlamaConfig) -> Any:  # noqa: ANN401
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config(**SIZES)).eval()
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made.to(device_of(client)).requires_grad_(False)


def prompt_of(client: ema.Pool, rows: int = 2, tokens: int = 12) -> torch.Tensor:
    made = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(2))
    return made.to(device_of(client))


def go_on(model: Any, prompt: torch.Tensor, cache: Any, tokens: int = 6, **more: Any) -> Any:  # noqa: ANN401
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{CACHE: cache},
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )


def tensors(cache: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]


def same(found: Any, wanted: Any) -> None:  # noqa: ANN401
    assert torch.equal(found.sequences, wanted.sequences)
    for mine, its in zip(found.logits, wanted.logits, strict=True):
        assert torch.equal(mine, its)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, its in zip(found, wanted, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_same_tokens_and_logits(client: ema.Pool, config: Any) -> None:  # noqa: ANN401
    model, prompt = model_of(client, config), prompt_of(client)
    plain = transformers.DynamicCache(config=model.config)
    with ElasticCache(model.config, client) as cache:
        same(go_on(model, prompt, cache), go_on(model, prompt, plain))
        equal(tensors(cache), tensors(plain))
        assert cache.nbytes == 2 * PER_TOKEN * cache.get_seq_length()


@pytest.mark.parametrize("config", CONFIGS)
def test_parked_and_resumed_in_the_middle(client: ema.Pool, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setattr(parked_module, "SLOT", client.granularity)
    model, prompt = model_of(client, config), prompt_of(client)
    plain, cache = transformers.DynamicCache(config=model.config), ElasticCache(model.config, client)
    mine, its = go_on(model, prompt, cache), go_on(model, prompt, plain)
    for _ in range(3):
        before, held = tensors(cache), cache.nbytes
        cache.park()
        cache.park()
        assert cache.parked
        assert cache.nbytes == held
        assert all(layer.keys is None and layer.values is None for layer in cache._layers)
        for use in (cache.get_seq_length, partial(go_on, model, prompt, cache), partial(cache.crop, -1)):
            with pytest.raises(ema.InUse, match="resume"):
                use()
        cache.resume()
        cache.resume()
        equal(tensors(cache), before)
        mine, its = go_on(model, mine.sequences, cache), go_on(model, its.sequences, plain)
        same(mine, its)
    cache.close()
    cache.close()
    with pytest.raises(ema.EmaError, match="closed"):
        go_on(model, prompt, cache)


def test_a_serving_loop_with_several_parked(client: ema.Pool) -> None:
    model = model_of(client)
    prompts = [prompt_of(client, 1, 5 + n) for n in range(4)]
    plain = [transformers.DynamicCache(config=model.config) for _ in prompts]
    caches = [ElasticCache(model.config, client) for _ in prompts]
    for _ in range(2):
        for n, cache in enumerate(caches):
            cache.resume()
            mine, its = go_on(model, prompts[n], cache), go_on(model, prompts[n], plain[n])
            same(mine, its)
            prompts[n] = its.sequences
            cache.park()
    assert all(cache.parked for cache in caches)
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_bit_comes_back(client: ema.Pool, dtype: torch.dtype) -> None:
    shape = (1, 2, 8 * client.granularity // 32, 8)
    bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device_of(client))
    with ElasticCache(transformers.LlamaConfig(**SIZES), client) as cache:
        for layer in range(3):
            cache.update(bits.add(layer).view(dtype), bits.sub(layer).view(dtype), layer)
        cache.crop(-3)  # views with gaps
        before = tensors(cache)
        cache.park()
        cache.resume()
        equal(tensors(cache), before)


def test_beams_crops_and_copies(client: ema.Pool) -> None:
    model, prompt = model_of(client), prompt_of(client)
    plain, cache = transformers.DynamicCache(config=model.config), ElasticCache(model.config, client)
    mine, its = (go_on(model, prompt, c, num_beams=3) for c in (cache, plain))
    assert torch.equal(mine.sequences, its.sequences)
    for one in (cache, plain):
        one.batch_select_indices(torch.tensor([0, 3], device=prompt.device))
        one.crop(-2)
    twin = copy.deepcopy(cache)
    equal(tensors(twin), tensors(plain))
    cache.park()
    cache.reset()
    assert not cache.parked
    same(go_on(model, prompt, cache), go_on(model, prompt, transformers.DynamicCache(config=model.config)))
    equal(tensors(twin), tensors(plain))
    for one in (cache, twin):
        one.close()


def test_the_local_budget(client: ema.Pool) -> None:
    model, prompt = model_of(client, transformers.Qwen2Config), prompt_of(client)
    with ElasticCache(model.config, client, local=2 * PER_TOKEN * 15) as cache:
        with pytest.raises(ema.LimitReached, match="local"):
            go_on(model, prompt, cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {15}
        plain = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, **{CACHE: plain})
        equal([t[..., :12, :] for t in tensors(cache)], tensors(plain))
        cache.crop(-5)
        with torch.no_grad():
            model(prompt[:, :5], **{CACHE: cache})
        with pytest.raises(ema.LimitReached):
            cache.batch_repeat_interleave(2)
    with ElasticCache(model.config, client, local=PER_TOKEN) as cache:
        with pytest.raises(ema.LimitReached):
            go_on(model, prompt, cache)
        assert cache.nbytes == 0
        cache.park()  # nothing to move
        assert not cache.parked


def test_what_it_cannot_do_is_refused(client: ema.Pool) -> None:
    config = transformers.LlamaConfig(**SIZES)
    sliding = transformers.MistralConfig(**SIZES, sliding_window=8)
    for bad, says in (("x", "model.config"), (sliding, "Sliding"), (transformers.T5Config(), "encoder")):
        with pytest.raises(ema.BadInput, match=says):
            ElasticCache(bad, client)
    with pytest.raises(ema.BadInput, match="local"):
        ElasticCache(config, client, local=-1)
    cache = ElasticCache(config, client)
    states = torch.zeros(1, 2, 1, 8, device=device_of(client))
    with pytest.raises(ema.BadInput, match="layer_idx"):
        cache.update(states, states, 3)
    with pytest.raises(ema.BadInput, match="key_states is on meta"):
        cache.update(states.to("meta"), states, 0)
    with pytest.raises(ema.EmaError, match="pickled"):
        pickle.dumps(cache)
    model, prompt = model_of(client), prompt_of(client)
    with pytest.raises(ValueError, match="cache_implementation"):
        go_on(model, prompt, cache, cache_implementation="static")
    cache.update(states.clone().requires_grad_(), states, 0)
    with pytest.raises(ema.BadInput, match="gradient"):
        cache.park()
    cache.close()


def test_graphs_are_refused_and_broken_ones_are_right(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of(client), prompt_of(client)
    cache, plain = ElasticCache(model.config, client), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="cannot be compiled"):
            torch.compile(model, backend="eager", fullgraph=True)(prompt, **{CACHE: cache})
        assert cache.nbytes == 0
        model(prompt, **{CACHE: plain})
        torch.compile(model, backend="eager")(prompt, **{CACHE: cache})
        before = tensors(cache)
        # Compiled around the cache, a GPU's products may round otherwise.
        torch.testing.assert_close(before, tensors(plain))
        with monkeypatch.context() as patch:
            patch.setattr(cache._order, "capturing", lambda: True)
            with pytest.raises(ema.EmaError, match="captured"):
                model(prompt, **{CACHE: cache})
        equal(tensors(cache), before)
    cache.close()


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
        it.on_loop(lambda: setattr(it.agent.cleaner, "_candidates", list))  # no copy in host memory saves it
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


def test_pieces_hold_every_byte_once() -> None:
    sizes = [5, 0, 16, 1, 30]
    pieces = cut(sizes, 8)
    assert [p[-1].at + p[-1].size for p in pieces] == [8, 8, 8, 8, 8, 8, 4]
    found: dict[int, int] = dict.fromkeys(range(5), 0)
    for piece in pieces:
        assert piece[0].at == 0
        for part, following in itertools.pairwise(piece):
            assert following.at == part.at + part.size
        for part in piece:
            assert part.start == found[part.tensor]
            found[part.tensor] += part.size
    assert list(found.values()) == sizes


def test_a_tensor_with_gaps_is_made_dense_once_and_may_not_fit(
    client: ema.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = model_of(client), prompt_of(client)
    monkeypatch.setattr(parked_module, "SLOT", client.granularity)  # many slots for each tensor
    made: list[int] = []
    dense = parked_module._bytes

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.nbytes)
        return dense(tensor)

    with ElasticCache(model.config, client) as cache:
        go_on(model, prompt, cache)
        cache.crop(-3)
        before, held = tensors(cache), len(cache.layers) * 2
        monkeypatch.setattr(parked_module, "_bytes", counted)
        cache.park()
        assert len(made) == held
        cache.resume()
        assert all(map(torch.equal, tensors(cache), before))

        def full(_tensor: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(parked_module, "_bytes", full)
        with pytest.raises(ema.OutOfMemory, match="gaps"):
            cache.park()
        assert all(map(torch.equal, tensors(cache), before))
