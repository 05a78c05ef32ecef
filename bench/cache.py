"""Keys and values that wait on neighbours, or are computed again: `python bench/cache.py`. Needs a GPU.

A decoder of Llama-3.1-8B's shape, random weights, whole GPU; the lender is the host over PCIe. Prompts have the median
and the 90th percentile of a real trace's lengths. A request is preempted and goes on: its keys and values are parked
and resumed (`ElasticCache`), or computed again. And a token is decoded with the cache local, offloaded as
transformers does it, and beyond a local budget.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import ema
from ema.transformers import ElasticCache
from on_gpu import GIB, link_rate, name, say, spec, versions
from record import Row, at_least, finish, percentile, plain, record
from server import Server

TRACE: Final = Path(__file__).parents[1] / "examples" / "traces" / "mooncake_conversation_1min.jsonl"
TOKENS: Final = 16
"""Decoded for one figure."""
LOCAL: Final = 0.6
"""Of a request's bytes: the budget of a cache that goes on beyond it."""
CONFIG: Final = transformers.LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=131072,
    dtype="bfloat16",
)


def main() -> int:
    """Measure and keep."""
    torch.manual_seed(0)
    link = link_rate()
    lengths = [json.loads(line)["input_length"] for line in TRACE.read_text("utf-8").splitlines()]
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()
    rows = [plain("link, plain pinned copies", link / 1e9, "GB/s")]
    with Server(None, spec(16 * GIB)) as server, ema.connect(server.socket) as pool, torch.inference_mode():
        for percent in (50, 90):
            rows += prompt(model, pool, link, int(percentile(lengths, percent)), f"p{percent}")
    what = (
        "Requests that are preempted and go on, and tokens decoded, with keys and values on lent host memory over PCIe"
    )
    return finish(record("cache", what, rows, gpu=name(), versions=versions()))


def prompt(model: Any, pool: ema.Pool, link: float, length: int, which: str) -> Iterator[Row]:  # noqa: ANN401
    """One prompt's length."""
    ids = torch.randint(1, CONFIG.vocab_size, (1, length), device="cuda")
    where = f"prompt of {length} tokens ({which})"

    def prefill(cache: Any) -> Any:  # noqa: ANN401
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    with prefill(ElasticCache(model.config, pool)) as cache:
        again = timed(lambda: prefill(transformers.DynamicCache(config=model.config)), 3)
        before = [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]
        cache.park()  # whatever is made once
        cache.resume()
        parks, resumes = [], []
        for _ in range(5):
            parks.append(timed(cache.park, 1))
            resumes.append(timed(cache.resume, 1))
        after = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise SystemExit("wrong bytes")
        del before, after
        bound = cache.nbytes / link
        park, resume = statistics.median(parks), statistics.median(resumes)
        yield plain(f"{where}: keys and values", cache.nbytes / GIB, "GiB")
        yield plain(f"{where}: computed again", again * 1e3, "ms")
        yield plain(f"{where}: bytes / link", bound * 1e3, "ms")
        yield plain(f"{where}: park", park * 1e3, "ms")
        yield plain(f"{where}: resume", resume * 1e3, "ms")
        yield plain(f"{where}: resume, of the link's rate", 100 * bound / resume, "%")
        yield at_least(2, f"{where}: computed again, over park and resume", again / (park + resume), "x")
        elastic, size = decode(model, cache), cache.nbytes
    local = decode(model, prefill(transformers.DynamicCache(config=model.config)))
    offloaded = decode(model, prefill(transformers.DynamicCache(config=model.config, offloading=True)))
    yield plain(f"{where}: a token, DynamicCache", local * 1e3, "ms")
    yield at_least(98, f"{where}: a token, ElasticCache, of that speed", 100 * local / elastic, "%")
    yield plain(
        f"{where}: a token, transformers' offloaded cache, of DynamicCache's speed", 100 * local / offloaded, "%"
    )
    with prefill(ElasticCache(model.config, pool, local=int(LOCAL * size))) as cache:
        beyond, report = decode(model, cache), cache.report
        bound = 100 * local / max(local, report.fetched_bytes / link)
        part = 100 * report.remote_tokens / report.tokens
        yield plain(f"{where}: remote tokens at a local budget of {100 * LOCAL:.0f} %", part, "%")
        yield plain(f"{where}: a token with these, bound, of that speed", bound, "%")
        yield plain(f"{where}: a token with these, ElasticCache, of that speed", 100 * local / beyond, "%")
    say(where)


def decode(model: Any, cache: Any) -> float:  # noqa: ANN401
    """Seconds of a token."""
    token = torch.ones(1, 1, dtype=torch.long, device="cuda")

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True)

    step()
    return timed(step, TOKENS)


def timed(work: Callable[[], object], times: int) -> float:
    """Seconds of one of so many, by the clock."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    sys.exit(main())
