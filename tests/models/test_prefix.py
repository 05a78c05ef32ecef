"""Beginnings of prompts kept on neighbours: found bit for bit or not at all, whatever becomes of the neighbours."""

import itertools
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
pytest.importorskip("transformers", reason="no transformers: pip install '.[torch]'")
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import ema
from client.test_droppable import squeeze
from ema.region import Region
from ema.torch.memory import device_of
from ema.transformers import ElasticCache, PrefixStore
from ema.transformers import prefix_layout as layout_module
from ema.transformers.pieces import packed
from ema.transformers.prefix_tree import Block, Place, Tree
from ema.transformers.shelves import shelf_bytes
from ema_agent.lease import Chunk, State
from ema_core.plan import Cause
from ema_driver.sim.faults import LostGpu
from models.caches import CACHE, CONFIGS, PER_TOKEN, SIZES, equal, go_on, model_of, prompt_of, same, tensors
from models.interrupts import interrupt, lines_of
from nodes import Node, node, pool, sim, until
from up import Up

torch.set_num_threads(1)
BLOCK = 4
TAKEN = {"spillTo": ["Drop"], "hostMemory": "0"}
CONFIG = transformers.LlamaConfig(**SIZES)


def prefill(model: Any, prompt: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
    """Logits of what the cache lacks, and the cache."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        return model(prompt[:, cache.get_seq_length() :], **{CACHE: cache}).logits, cache


def states(client: ema.Pool, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> ElasticCache:
    """A cache of random keys and values."""
    dice = torch.Generator().manual_seed(seed)
    cache = ElasticCache(CONFIG, client)
    for layer in range(3):
        k, v = (torch.randn(1, 2, tokens, 8, generator=dice).to(dtype).to(device_of(client)) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def ids(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 64), k=tokens)


def begins(found: ElasticCache, kept: ElasticCache, tokens: int) -> None:
    """The found cache is the first tokens of the kept one, each bit."""
    assert found.get_seq_length() == tokens
    equal(tensors(found), [t[..., :tokens, :] for t in tensors(kept)])


def begun(cache: Any, tokens: int) -> transformers.DynamicCache:  # noqa: ANN401
    """The first tokens of a cache as one of transformers' own."""
    made = transformers.DynamicCache(config=CONFIG)
    for number, layer in enumerate(cache.layers):
        made.update(layer.keys[..., :tokens, :].clone(), layer.values[..., :tokens, :].clone(), number)
    return made


@pytest.mark.parametrize("config", CONFIGS)
def test_a_prompt_that_begins_alike(client: ema.Pool, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setattr(layout_module, "SLOT", client.granularity)
    model, prompt = model_of(client, config), prompt_of(client, 1, 15)
    other = torch.cat((prompt[:, :10], prompt_of(client, 1, 7)), 1)
    _, cache = prefill(model, prompt)
    with PrefixStore(model.config, client, block=BLOCK) as store:
        assert store.resume(prompt).get_seq_length() == 0
        assert [store.keep(prompt, cache) for _ in range(2)] == [12, 12]
        for asked, found in ((prompt, 12), (other, 8), (prompt[:, :13], 12), (prompt[:, :12], 8)):
            with store.resume(asked) as resumed:
                begins(resumed, cache, found)
                mine = go_on(model, asked, resumed)
                same(mine, go_on(model, asked, begun(cache, found)))
                anew = go_on(model, asked, transformers.DynamicCache(config=model.config))
                assert torch.equal(mine.sequences, anew.sequences)
        assert store.resume(prompt[0, :4].tolist()).get_seq_length() == 0, "one token is left to compute"
        report = store.report()
        assert (report.blocks, report.hits, report.misses) == (3, 3 + 2 + 3 + 2, 3 + 2)
        assert (report.evicted, report.reclaimed) == (0, 0)
        assert report.nbytes % client.chunk == 0
        assert report.nbytes >= 12 * PER_TOKEN


def test_turn_by_turn(client: ema.Pool) -> None:
    model, told = model_of(client), prompt_of(client, 1, 9)
    with PrefixStore(model.config, client, block=BLOCK) as store:
        cache = ElasticCache(model.config, client)
        for turn in range(3):
            if turn:
                resumed = store.resume(told)
                begins(resumed, cache, (12, 20)[turn - 1])
                cache = resumed
            told = go_on(model, told, cache, tokens=7).sequences
            assert store.keep(told, cache) == (12, 20, 28)[turn]  # the last token made is in no cache yet
        assert store.report().blocks == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_comes_back(client: ema.Pool, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(layout_module, "SLOT", client.granularity)
    block = 5 * client.granularity // 32 - 3  # blocks of several slots, with odd ends
    tokens = ids(3 * block + 1)
    bits = torch.randint(-(1 << 15), 1 << 15, (1, 2, 3 * block + 9, 8), dtype=torch.int16, device=device_of(client))
    with ElasticCache(CONFIG, client) as cache, PrefixStore(CONFIG, client, block=block) as store:
        for layer in range(3):
            k, v = (bits.add(n + layer).repeat_interleave(dtype.itemsize // 2, -1).view(dtype) for n in (0, 7))
            cache.update(k, v, layer)
        cache.crop(-3)  # views with gaps
        assert store.keep(tokens, cache) == 3 * block
        begins(store.resume(tokens), cache, 3 * block)
        begins(store.resume(tokens[:-block]), cache, 2 * block)


def test_the_same_block_after_another_is_another(client: ema.Pool) -> None:
    a, b, c = (ids(BLOCK, seed) for seed in range(3))
    one, two, three = (states(client, 3 * BLOCK, seed) for seed in range(3))
    with PrefixStore(CONFIG, client, block=BLOCK) as store:
        assert store.keep(a + b + c, one) == store.keep(b + b + c, two) == 3 * BLOCK
        assert store.report().blocks == 6
        begins(store.resume([*a, *b, *c, 1]), one, 3 * BLOCK)
        begins(store.resume([*b, *b, *c, 1]), two, 3 * BLOCK)
        begins(store.resume([*b, *c, *c, 1]), two, BLOCK)
        assert store.resume([*c, *b, *c, 1]).get_seq_length() == 0
        assert store.resume([*a, *b, *c, 1], salt=b"a tenant").get_seq_length() == 0
        store.keep(a + b + c, three, salt=b"a tenant")
        begins(store.resume([*a, *b, *c, 1], salt=b"a tenant"), three, 3 * BLOCK)
        begins(store.resume([*a, *b, *c, 1]), one, 3 * BLOCK)
        store.clear()
        assert store.resume([*a, *b, *c, 1]).get_seq_length() == 0
        assert store.report().nbytes == 0


def test_what_it_cannot_do_is_refused(client: ema.Pool) -> None:
    tokens, cache = ids(8), states(client, 8)
    sliding = transformers.MistralConfig(**SIZES, sliding_window=8)
    for bad, says in (("x", "model.config"), (sliding, "Sliding"), (transformers.T5Config(), "encoder")):
        with pytest.raises(ema.BadInput, match=says):
            PrefixStore(bad, client)
    wrongs: list[dict[str, Any]] = [{"block": 0}, {"block": 1.5}, {"limit": 0}, {"limit": "1Gi"}]
    for wrong in wrongs:
        with pytest.raises(ema.BadInput, match=next(iter(wrong))):
            PrefixStore(CONFIG, client, **wrong)
    padded = transformers.LlamaConfig(**SIZES, pad_token_id=60)
    with PrefixStore(padded, client, block=BLOCK) as store:
        no_tokens: list[Any] = [torch.zeros(2, 4, dtype=torch.int64), torch.tensor(3), torch.rand(8), ["a"], [1.5], 5]
        for tokens_like in no_tokens:
            for use in (store.resume, lambda t: store.keep(t, cache)):
                with pytest.raises(ema.BadInput, match="tokens"):
                    use(tokens_like)
        with pytest.raises(ema.BadInput, match="padding"):
            store.keep([60, 60, *tokens], cache)
        with pytest.raises(ema.BadInput, match="salt"):
            store.resume(tokens, salt="x")  # type: ignore[arg-type]
        with pytest.raises(ema.BadInput, match="timeout"):
            store.keep(tokens, cache, timeout=-1)
        batch = transformers.DynamicCache(config=CONFIG)
        for layer in range(3):
            batch.update(*torch.zeros(2, 2, 2, 8, 8, device=device_of(client)), layer)
        away = begun(cache, 8)
        away.layers[1].keys = away.layers[1].keys.to("meta")
        empty = transformers.DynamicCache(config=CONFIG)
        for no_cache, says in ((batch, "one sequence"), (away, "on meta"), (empty, "layers"), ("x", "DynamicCache")):
            with pytest.raises(ema.BadInput, match=says):
                store.keep(tokens, no_cache)
        assert store.keep(tokens, cache) == 8
        with pytest.raises(ema.BadInput, match=r"2 heads of 8 torch.bfloat16 in layer 0; .*float32, as it was kept"):
            store.keep(tokens, states(client, 8, dtype=torch.bfloat16))
        cache.park()
        with pytest.raises(ema.InUse, match="resume"):
            store.keep(tokens, cache)
        assert store.report().blocks == 2
    with pytest.raises(ema.EmaError, match="closed"):
        store.resume(tokens)
    with PrefixStore(CONFIG, client, block=BLOCK, limit=1) as small, pytest.raises(ema.BadInput, match="one block"):
        small.keep(tokens, states(client, 8))
    store.close()
    cache.close()


def test_the_least_recently_used_go_first(client: ema.Pool) -> None:
    block = client.chunk // PER_TOKEN // 2  # two to a chunk
    a, b, c, d = (ids(2 * block + 1, seed) for seed in range(4))
    kept = {seed: states(client, 2 * block, seed) for seed in range(4)}
    with PrefixStore(CONFIG, client, block=block, limit=2 * client.chunk) as store:
        assert store.keep(a, kept[0]) == store.keep(b, kept[1]) == 2 * block
        assert store.report().nbytes == 2 * client.chunk
        begins(store.resume(a), kept[0], 2 * block)
        assert store.keep(c[: block + 1], kept[2]) == block, "the end of b makes place"
        begins(store.resume(b), kept[1], block)
        begins(store.resume(a), kept[0], 2 * block)
        assert store.keep(d, kept[3]) == 2 * block, "all of c and what is left of b do"
        for tokens, number, found in ((a, 0, 2), (d, 3, 2)):
            begins(store.resume(tokens), kept[number], found * block)
        for tokens in (b, c):
            assert store.resume(tokens).get_seq_length() == 0
        more = states(client, 7 * block, 9)
        assert store.keep(ids(7 * block, 9), more) == 4 * block, "a prompt does not make place for itself"
        begins(store.resume(ids(7 * block, 9)), more, 4 * block)
        report = store.report()
        assert (report.blocks, report.evicted, report.reclaimed) == (4, 1 + 2 + 4, 0)
        assert report.nbytes == 2 * client.chunk


def test_reclaimed_blocks_are_not_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(
        tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki", reclaim=TAKEN, lending={"headroom": "512Ki"})
    ) as it:
        client = it.connect(0)
        block = client.chunk // PER_TOKEN  # one to a chunk
        tokens, cache = ids(4 * block + 1), states(client, 4 * block)
        with PrefixStore(CONFIG, client, block=block) as store:
            assert store.keep(tokens, cache) == 4 * block
            held = squeeze(it)
            until(lambda: it.lent(1) + it.lent(2) + it.lent(3) == 0, saying="all is dropped")
            assert store.resume(tokens).get_seq_length() == 0
            report = store.report()
            assert (report.blocks, report.nbytes, report.reclaimed) == (0, 0, 4)
            assert store.keep(tokens, cache) == 0, "nothing is to be had"
            it.observer.release(held)
            until(lambda: store.keep(tokens, cache) == 4 * block, saying="there is memory again")
            begins(store.resume(tokens), cache, 4 * block)


def drop(it: Node, region: int, chunk: int = 0) -> None:
    """Have the pool take a chunk back."""

    def chunks() -> list[Chunk]:
        return [c for c in it.agent.ledger.chunks() if (c.region.number, c.index) == (region, chunk)]

    found = it.on_loop(chunks)
    it.on_loop(lambda: it.agent.steward.moves.drop(found, Cause.HEADROOM, time.monotonic()))
    it.until(lambda _: [c.state for c in found] == [State.DROPPED], saying="it is dropped")


def regions(it: Node) -> int:
    return it.on_loop(lambda: sum(len(lease.regions) for lease in it.agent.ledger.leases.values()))


@pytest.mark.parametrize("when", ["before", "while it is fetched"])
def test_a_block_that_goes_ends_the_prefix(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(layout_module, "SLOT", 4096)
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki", reclaim=TAKEN)) as it:
        client = it.connect(0)
        block = client.chunk // PER_TOKEN  # one to a chunk
        tokens, cache = ids(6 * block + 1), states(client, 6 * block)
        with PrefixStore(CONFIG, client, block=block) as store:
            assert store.keep(tokens, cache) == 6 * block
            if when == "before":
                drop(it, 3)
            else:
                fetch, calls = Region.fetch, itertools.count()

                def fetched(region: Region, *args: Any) -> Any:  # noqa: ANN401
                    if next(calls) == 3 * 6 + 4:  # each tensor of a block has a slot of its own
                        drop(it, 3)
                    return fetch(region, *args)

                monkeypatch.setattr(Region, "fetch", fetched)
            begins(store.resume(tokens), cache, 3 * block)
            monkeypatch.undo()
            report = store.report()
            assert (report.blocks, report.reclaimed, report.nbytes) == (3, 3, 3 * client.chunk)
            assert regions(it) == 3, "what held the others is given back"
            begins(store.resume(tokens), cache, 3 * block)
            assert store.keep(tokens, cache) == 6 * block
            begins(store.resume(tokens), cache, 6 * block)


def test_a_shelf_that_went_in_part(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki", reclaim=TAKEN)) as it:
        client = it.connect(0)
        block = 3 * client.chunk // PER_TOKEN // 2  # two to three chunks
        tokens, cache = ids(2 * block + 1), states(client, 2 * block)
        with PrefixStore(CONFIG, client, block=block) as store:
            assert store.keep(tokens, cache) == 2 * block
            assert store.report().nbytes == 3 * client.chunk
            drop(it, 0, chunk=2)
            begins(store.resume(tokens), cache, block)
            assert store.keep(tokens, cache) == 2 * block, "not where the pool took memory back"
            assert store.report().nbytes == 6 * client.chunk
            begins(store.resume(tokens), cache, 2 * block)
            drop(it, 0, chunk=0)
            assert store.resume(tokens).get_seq_length() == 0
            assert regions(it) == 0


def test_what_went_makes_place_before_what_is_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki", reclaim=TAKEN)) as it:
        client = it.connect(0)
        block = client.chunk // PER_TOKEN
        a, b, c = ((ids(block + 1, seed), states(client, block, seed)) for seed in range(3))
        with PrefixStore(CONFIG, client, block=block, limit=2 * client.chunk) as store:
            assert store.keep(*a) == store.keep(*b) == block
            drop(it, 1)
            assert store.keep(*c) == block
            report = store.report()
            assert (report.blocks, report.evicted, report.reclaimed) == (2, 0, 1)
            for tokens, cache in (a, c):
                begins(store.resume(tokens), cache, block)


def test_a_full_pool_lets_older_ones_go(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    rules = pool(chunk="64Ki", borrowing={"maxPerPod": "128Ki"})
    with node(tmp_path_factory.mktemp("n"), config, rules) as it:
        client = it.connect(0)
        block = client.chunk // PER_TOKEN
        with PrefixStore(CONFIG, client, block=block) as store:
            for seed in range(3):
                cache, tokens = states(client, 4 * block, seed), ids(4 * block, seed)
                assert store.keep(tokens, cache) == 2 * block
                begins(store.resume(tokens), cache, 2 * block)
            assert store.report().evicted == 4
            assert it.on_loop(lambda: len(it.agent.sessions)) == 2, "one connection for all blocks"


def test_a_killed_agent(tmp_path: Path) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        tokens, cache = ids(9), states(client, 9)
        store = PrefixStore(CONFIG, client, block=BLOCK)
        assert store.keep(tokens, cache) == 8
        agent.kill()
        for _ in range(2):
            assert store.resume(tokens).get_seq_length() == 0
            assert store.keep(tokens, cache) == 0
        assert (store.report().blocks, store.report().nbytes, store.report().reclaimed) == (0, 0, 2)
        agent.start()
        until(lambda: client.session == 2, within=30, saying="connected to the new agent")
        assert store.resume(tokens).get_seq_length() == 0
        until(lambda: store.keep(tokens, cache) == 8, saying="there is memory to be had")
        begins(store.resume(tokens), cache, 8)
        store.close()
        store.close()


def test_an_agent_that_came_back_unseen(tmp_path_factory: pytest.TempPathFactory) -> None:
    with node(tmp_path_factory.mktemp("n"), sim(link_delays=False, granularity=4096)) as it:
        client = it.connect(0)
        tokens, cache = ids(9), states(client, 9)
        with PrefixStore(CONFIG, client, block=BLOCK) as store:
            assert store.keep(tokens, cache) == 8
            it.stop()
            it.start()
            it.until(lambda a: len(a.sessions) == 2, within=30, saying="both connections are there again")
            assert store.resume(tokens).get_seq_length() == 0
            until(lambda: store.keep(tokens, cache) == 8, saying="there is memory to be had")
            begins(store.resume(tokens), cache, 8)


@pytest.mark.slow
def test_a_lost_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki")) as it:
        client = it.connect(0)
        block = client.chunk // PER_TOKEN
        tokens, cache = ids(4 * block + 1), states(client, 4 * block)
        with PrefixStore(CONFIG, client, block=block) as store:
            assert store.keep(tokens, cache) == 4 * block
            places = it.on_loop(lambda: {c.place for c in it.agent.ledger.chunks()})
            fault = LostGpu(gpu=[str(g) for g in it.gpus].index(min(map(str, places))))
            it.observer.inject(fault)
            try:
                found = store.resume(tokens)
                if found.get_seq_length():
                    begins(found, cache, found.get_seq_length())
                until(lambda: store.resume(tokens).get_seq_length() == 0, saying="what is lost is not found")
                until(lambda: store.keep(tokens, cache) == 4 * block, saying="other GPUs lend")
                begins(store.resume(tokens), cache, 4 * block)
            finally:
                it.observer.clear(fault)


def test_no_room_for_what_was_found(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, cache = ids(9), states(client, 9)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    with PrefixStore(CONFIG, client, block=BLOCK) as store:
        store.keep(tokens, cache)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            with pytest.raises(ema.OutOfMemory):
                store.resume(tokens)
        begins(store.resume(tokens), cache, 8)


def test_a_fetch_makes_no_tensor_but_the_caches(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SLOT", client.granularity)

    class Made(TorchDispatchMode):
        """Counts the bytes of new storages."""

        def __init__(self) -> None:
            super().__init__()
            self.nbytes = 0

        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not any(
                isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()
                for a in args
            ):
                self.nbytes += made.untyped_storage().nbytes()
            return made

    tokens, cache = ids(1001), states(client, 1001)
    with PrefixStore(CONFIG, client, block=200) as store:
        with Made() as made:
            assert store.keep(tokens, cache) == 1000
        assert store._shelves is not None
        slots = 2 * store._shelves.layout.slot_bytes
        assert made.nbytes <= slots
        with Made() as made:
            found = store.resume(tokens)
        assert found.nbytes <= made.nbytes <= found.nbytes + slots
        begins(found, cache, 1000)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # just made when interrupted: collected later
@pytest.mark.parametrize("what", ["keep", "resume"])
def test_interrupted_anywhere(torch_node: Node, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    torch_node.until(lambda a: not a.sessions, saying="the sessions of the test before have ended")
    dice = random.Random(what)
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0]) as client:
        free = torch_node.memory(0).free
        store = PrefixStore(CONFIG, client, block=200, limit=2 * client.chunk)
        tokens, cache = ids(1001), states(client, 1001)
        connect, ready = client.another, list[ema.Pool]()
        monkeypatch.setattr(client, "another", ready.pop)  # connecting itself is not in question here

        def lent() -> int:
            return sum(torch_node.agent.ledger.lent.values())

        def prepare() -> None:
            ready[:] = ready or [connect()]
            store.keep(tokens, cache)
            if what == "keep" and dice.random() < 0.5:
                store.clear()
            ready[:] = ready or [connect()]

        def action() -> object:
            other = ids(1001, dice.randrange(3))
            return store.keep(other, cache) if what == "keep" else store.resume(tokens)

        prepare()
        most = lines_of(action)
        for after in sorted(dice.randrange(1, most) for _ in range(25)):
            prepare()
            with interrupt(after), suppress(KeyboardInterrupt):
                action()
            torch_node.until(lambda _: torch_node.memory(0).free == free, saying="no slot is left")
            torch_node.until(lambda _: lent() == store.report().nbytes, saying="nothing is held that it knows not of")
            ready[:] = ready or [connect()]
            found = store.resume(tokens)
            if found.get_seq_length():
                begins(found, cache, found.get_seq_length())
            assert store.keep(tokens, cache) == 1000
            begins(store.resume(tokens), cache, 1000)
        for spare in ready:
            spare.close()
        store.close()
        torch_node.until(lambda a: len(a.sessions) == 1, saying="nothing but the client's own session is left")
        assert torch_node.memory(0).free == free
        cache.close()


def test_interrupted_while_it_gives_back(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, cache = ids(9), states(client, 9)
    with PrefixStore(CONFIG, client, block=BLOCK) as store:
        store.keep(tokens, cache)
        close = ema.Pool.close

        def interrupted(pool: ema.Pool) -> None:
            close(pool)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ema.Pool, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.clear()
        assert store.resume(tokens).get_seq_length() == 0
        assert store.keep(tokens, cache) == 8
        begins(store.resume(tokens), cache, 8)


def test_whole_tensors_are_packed() -> None:
    pieces = packed([3, 4, 8, 0, 1, 2], 8)
    assert [[(p.tensor, p.at, p.size) for p in piece] for piece in pieces] == [
        [(0, 0, 3), (1, 3, 4)],
        [(2, 0, 8), (3, 8, 0)],
        [(4, 0, 1), (5, 1, 2)],
    ]


def test_shelves_waste_little() -> None:
    for block in (1, 7, 50, 51, 63, 99, 100, 101, 149, 1000, 1001):
        size = shelf_bytes(100, block, None)
        assert size % 100 == 0
        assert size >= block
        assert (size % block) * 8 <= size
    assert shelf_bytes(100, 60, 300) == 200
    assert shelf_bytes(100, 60, 199) == 100
    with pytest.raises(ema.BadInput, match="limit is 199; expected at least 200"):
        shelf_bytes(100, 101, 199)


def test_the_tree_forgets_leaves_before_their_parents() -> None:
    dice, tree = random.Random(5), Tree()
    for number in range(310):
        keys = [bytes([dice.randrange(3)]) for _ in range(dice.randrange(1, 6))]
        path = tree.find(keys)
        tree.add(path, keys[len(path) :], [Place(None, number)] * (len(keys) - len(path)))  # type: ignore[arg-type]
        assert len(tree.find(keys)) == len(keys)
        if number % 20 == 19:
            newest, before, parents = tree.find(keys), len(tree), [*tree]
            ages = list[int]()
            for gone in itertools.islice(tree.oldest(), dice.randrange(200)):
                assert not gone.following, "a leaf"
                assert gone in parents
                ages.append(gone.used)
            assert ages == sorted(ages)
            assert len(tree) == before - len(ages)
            assert tree.find(keys) == newest
    inner = dice.choice([block for block in tree if block.following])
    before = len(tree)

    def size(block: Block) -> int:
        return 1 + sum(size(b) for b in block.following.values())

    assert tree.prune(lambda block: block is inner) == size(inner) == before - len(tree)
