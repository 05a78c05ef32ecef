"""A cache beyond its local budget: equal to transformers' own, whatever is done with it."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers

import ema
import ema.torch
from ema.channel import Channel
from ema.transformers import ElasticCache
from ema.transformers import beyond as beyond_module
from models.budgets import ROWS, Watched, budget, count, model_of, per_token, prompt_of_model, small_budget, step
from models.caches import CACHE, equal, go_on, prompt_of, same, tensors
from nodes import Node

torch.set_num_threads(1)

Budgeted = tuple[Any, Any, Any]


@pytest.fixture
def budgeted(client: ema.Pool) -> Iterator[Budgeted]:
    """A model, transformers' own cache, and one with a small budget."""
    with small_budget(client) as found:
        yield found


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
            assert taken[0] == 0 < taken[1] < max(taken)
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


def test_of_a_model_whose_weights_are_remote_too(budgeted: Budgeted, client: ema.Pool) -> None:
    model, plain, cache = budgeted
    prompt = prompt_of_model(model, tokens=40)
    wanted = go_on(model, prompt, plain, 20)
    ema.torch.stream(model, client, resident=0.0)
    same(go_on(model, prompt, cache, 20), wanted)
    assert cache.report.remote_tokens
    cache.park()
    ema.torch.unstream(model)


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
