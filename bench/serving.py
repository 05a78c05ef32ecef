"""What a memory share serves: static, borrowing, twice the memory: `python bench/serving.py`. Needs a GPU.

Decode with continuous batching in the scale model (see `on_gpu.py`): a share whose weights fill 85 to 92 %, the rest
holds the keys and values of running requests, 128 MiB each. Arrivals and output lengths are of a real trace, its times
scaled to the load. Borrowing streams a part of every layer's weights, and the room that it frees runs more requests.
Two settings: saturated (a full queue), where the bound predicts the gain from local step times of this run; and a load
of 1.5 times what the static share can serve. Prompts are taken as read: all three would compute them alike.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import ema
import ema.torch
from ema_cli.serving.trace import Request, read_trace
from on_gpu import GIB, MIB, link_rate, name, say, slice_of, spec, timed, versions
from record import Row, at_least, at_most, finish, percentile, plain, record
from server import Server
from stacks import Stack, caches

TRACE: Final = Path(__file__).parents[1] / "examples" / "traces" / "azure_conversation_10min.csv"
MULTIPROCESSORS: Final = 8
LAYERS, WIDTH, INNER, HEADS, CONTEXT = 32, 4096, 11008, 32, 256
KV: Final = LAYERS * 2 * CONTEXT * WIDTH * 2
"""Bytes of one running request."""
FILLED: Final = (0.85, 0.9)
"""Of the share, by weights."""
SATURATED: Final = 120
"""Steps of a saturated run."""
LONGEST: Final = 64
"""Tokens of an output at most, so that a run of `SECONDS` sees many requests come and go."""
SECONDS: Final = 15.0
MARGIN: Final = 0.95
"""Of what hides in theory is streamed."""


@dataclass(slots=True)
class Served:
    """What a run came to."""

    seconds: float = 0.0
    tokens: int = 0
    ended: int = 0
    waits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Instance:
    """Continuous batching over `rows` requests at once. A step computes all rows up to the last one in use."""

    def __init__(self, stack: Stack, stream: Any, kept: Sequence[Any], rows: int) -> None:  # noqa: ANN401
        self._stack, self._stream, self._kept, self._rows = stack, stream, kept, rows
        self._x: Any = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step(self, rows: int) -> object:
        """One token for each of the first `rows` requests."""
        return self._stack(self._x[:rows], [(k[:rows], v[:rows]) for k, v in self._kept])

    def serve(self, requests: Sequence[Request], seconds: float) -> Served:
        """Requests as they arrive, for so long."""
        left: list[int] = [0] * self._rows
        waiting, done = list(reversed(requests)), Served()
        with torch.cuda.stream(self._stream):
            began = now = time.perf_counter()
            while now - began < seconds:
                for row in (i for i, n in enumerate(left) if n == 0):
                    if not waiting or waiting[-1].arrival > now - began:
                        break
                    request = waiting.pop()
                    left[row] = request.generated
                    done.waits.append(now - began - request.arrival)
                rows = max((i + 1 for i, n in enumerate(left) if n), default=0)
                if rows == 0:
                    time.sleep(0.0005)
                    now = time.perf_counter()
                    continue
                self.step(rows)
                self._stream.synchronize()  # a server looks at every token
                before, now = now, time.perf_counter()
                done.steps.append(now - before)
                running = sum(n > 0 for n in left)
                done.tokens += running
                left = [max(0, n - 1) for n in left]
                done.ended += running - sum(n > 0 for n in left)
            done.seconds = now - began
        return done


def main() -> int:
    """Measure and keep."""
    torch.manual_seed(0)
    link = link_rate()
    rows = [
        plain("link, plain pinned copies", link / 1e9, "GB/s"),
        plain("keys and values of a request", KV / MIB, "MiB"),
    ]
    stack = Stack(LAYERS, WIDTH, INNER, HEADS)
    stream = slice_of(MULTIPROCESSORS)
    with Server(None, spec(4 * GIB)) as server, ema.connect(server.socket) as pool, torch.inference_mode():
        for filled in FILLED:
            rows += share(pool, stack, stream, link, filled)
    what = (
        f"Decode of a real trace on a share of GPU memory, as a scale model ({MULTIPROCESSORS} multiprocessors, "
        "host memory over PCIe as the neighbour)"
    )
    return finish(record("serving", what, rows, gpu=name(), versions=versions()))


def share(pool: ema.Pool, stack: Stack, stream: Any, link: float, filled: float) -> Iterator[Row]:  # noqa: ANN401
    """Static, borrowing and twice the memory for one share."""
    size = stack.nbytes / filled
    where = f"weights {100 * filled:.0f} % of the share"
    static, twice = int((size - stack.nbytes) // KV), int((2 * size - stack.nbytes) // KV)
    kept = caches(LAYERS, twice, HEADS, CONTEXT, WIDTH)
    whole = Instance(stack, stream, kept, twice)
    local = {n: timed(partial(whole.step, n), stream, 12).median for n in (static, 2 * static)}
    # More rows make longer steps, longer steps hide more bytes, more bytes make more rows.
    slope = (local[2 * static] - local[static]) / static
    per_row = MARGIN * link * slope / KV
    borrow = MARGIN * link * local[static] / (1 - min(0.9, per_row))
    ema.torch.stream(stack, pool, resident=1 - borrow / stack.nbytes, slots=3)
    report = ema.torch.report(stack)
    rows = int((size - stack.nbytes + report.saved_bytes) // KV)
    say(f"{where}: rows {static}, {rows}, {twice}; remote {report.remote_bytes / GIB:.2f} GiB")
    loads = _loads(static / local[static])
    borrowing = Instance(stack, stream, kept, rows)
    equal = timed(partial(borrowing.step, rows), stream, 40)
    got = {"borrowing": (borrowing.serve(_queue(), SATURATED * equal.median), borrowing.serve(loads, SECONDS))}
    ema.torch.unstream(stack)
    own = timed(partial(borrowing.step, rows), stream, 40)
    for label, count in (("static", static), ("twice the memory", twice)):
        instance = Instance(stack, stream, kept, count)
        got[label] = (instance.serve(_queue(), SATURATED * equal.median), instance.serve(loads, SECONDS))
    predicted = rows / max(own.median, report.remote_bytes / link) / (static / local[static]) - 1
    yield plain(f"{where}: requests at once, static", static, "")
    yield plain(f"{where}: requests at once, borrowing", rows, "")
    yield plain(f"{where}: requests at once, twice the memory", twice, "")
    yield at_most(100 / 0.96, f"{where}: time per token at equal batch, of local", 100 * equal.median / own.median, "%")
    yield from _saturated(where, {label: saturated for label, (saturated, _) in got.items()}, predicted)
    yield from _loaded(where, {label: loaded for label, (_, loaded) in got.items()})


def _saturated(where: str, got: dict[str, Served], predicted: float) -> Iterator[Row]:
    gain = got["borrowing"].rate / got["static"].rate - 1
    for label, served in got.items():
        yield plain(f"{where}, saturated: {label}", served.rate, "tokens/s")
    yield plain(f"{where}, saturated: gain that the bound predicts", 100 * predicted, "%")
    yield at_least(95 * predicted, f"{where}, saturated: borrowing over static", 100 * gain, "%")
    part = 100 * got["borrowing"].rate / got["twice the memory"].rate
    yield plain(f"{where}, saturated: borrowing, of twice the memory", part, "%")


def _loaded(where: str, got: dict[str, Served]) -> Iterator[Row]:
    for label, loaded in got.items():
        yield plain(f"{where}, load 1.5: {label}", loaded.rate, "tokens/s")
        for percent in (50, 99):
            yield plain(f"{where}, load 1.5: {label}, step p{percent}", 1e3 * percentile(loaded.steps, percent), "ms")
            yield plain(f"{where}, load 1.5: {label}, waiting p{percent}", percentile(loaded.waits, percent), "s")
    part = 100 * got["borrowing"].rate / got["twice the memory"].rate
    yield at_least(96, f"{where}, load 1.5: borrowing, of twice the memory", part, "%")


def _queue() -> list[Request]:
    """Everybody is there from the start."""
    return [replace(r, arrival=0.0) for r in _trace()]


def _loads(capacity: float) -> list[Request]:
    """The trace, its times scaled so that it asks for 1.5 times `capacity` tokens per second."""
    found = _trace()
    scale = sum(r.generated for r in found) / found[-1].arrival / (1.5 * capacity)
    return [replace(r, arrival=r.arrival * scale) for r in found]


def _trace() -> list[Request]:
    return [replace(r, generated=min(r.generated, LONGEST)) for r in read_trace(TRACE)]


if __name__ == "__main__":
    sys.exit(main())
