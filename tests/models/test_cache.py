"""A cache on lent memory: equal to transformers' own, parked and resumed in the middle."""

import copy
import itertools
import pickle
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers

import ema
from ema.torch.memory import device_of
from ema.transformers import ElasticCache
from ema.transformers import parked as parked_module
from ema.transformers.pieces import cut
from models.caches import CACHE, CONFIGS, PER_TOKEN, SIZES, equal, go_on, model_of, prompt_of, same, tensors


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
