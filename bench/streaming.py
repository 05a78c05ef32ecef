"""Weights streamed from lent memory, against the bound and against what people use: `python bench/streaming.py`.

Needs a GPU. The lender is the host over PCIe. Two questions: whole layers from the host at many sizes of a step, and a
fraction of every layer at decode's sizes, in the scale model (see `on_gpu.py`) and on the whole GPU. The bound is
max(step with all memory local, remote bytes / link); for fractions the local step is taken beside plain copies of as
many bytes, since they cost memory traffic however they are made.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from accelerate import cpu_offload

import ema
import ema.torch
from on_gpu import GIB, MIB, Times, link_rate, name, say, slice_of, spec, timed, versions
from record import Row, at_least, finish, plain, record
from server import Server
from stacks import Layer, Stack, caches

TOKENS: Final = (512, 2048, 4096, 8192, 12288, 16384, 24576)
FRACTIONS: Final = (0.96, 0.92, 0.88, 0.8)
"""Of every layer that stays local."""
LENT: Final = 16 * GIB
CHUNK: Final = 256 * MIB
"""Each copy waits at its chunk's gate: large pieces want large chunks."""


def main() -> int:
    """Measure and keep."""
    torch.manual_seed(0)
    link = link_rate()
    rows = [plain("link, plain pinned copies", link / 1e9, "GB/s")]
    with Server(None, spec(LENT, CHUNK)) as server, ema.connect(server.socket) as pool, torch.inference_mode():
        rows += whole_layers(pool, link)
        for multiprocessors in (8, 16, 132):
            rows += fractions(pool, link, multiprocessors)
    what = "Weights streamed by `ema.torch.stream` from host memory over PCIe; local, bound and rivals in the same run"
    return finish(record("streaming", what, rows, gpu=name(), versions=versions()))


def whole_layers(pool: ema.Pool, link: float) -> Iterator[Row]:
    """All weights remote, on the whole GPU."""
    say("whole layers")
    stack = Stack(16, 5120, 13824, heads=40)
    stream = torch.cuda.Stream()
    inputs = {n: torch.randn(n, 5120, device="cuda", dtype=torch.bfloat16) for n in TOKENS}
    local = {n: timed(partial(stack.__call__, x), stream, _steps(n)) for n, x in inputs.items()}
    hooked = dict(rivals(stack, stream, inputs))
    before = stack(inputs[TOKENS[-1]])
    ema.torch.stream(stack, pool, resident=0.0)
    streamed = {n: timed(partial(stack.__call__, x), stream, _steps(n)) for n, x in inputs.items()}
    same = torch.equal(before, stack(inputs[TOKENS[-1]]))
    size = ema.torch.report(stack).remote_bytes
    ema.torch.unstream(stack)
    yield at_least(1, "whole layers: output equal to local, every bit", float(same), "")
    yield plain("whole layers: remote weights", size / GIB, "GiB")
    for n in TOKENS:
        yield from _against(f"whole layers, {n} tokens", streamed[n], local[n].median, size / link, least=99)
        for rival, times in hooked.items():
            if n in times:
                text = f"whole layers, {n} tokens: {rival}"
                yield plain(text, _percent(max(local[n].median, size / link), times[n].median), "% of the bound")


def fractions(pool: ema.Pool, link: float, multiprocessors: int) -> Iterator[Row]:
    """A part of every layer remote, at a decode step."""
    layers, width, heads, context = 16, 6144, 48, 336
    batch = 16 if multiprocessors < 132 else 192
    where = "whole GPU" if multiprocessors == 132 else f"scale model, {multiprocessors} multiprocessors"
    say(f"fractions, {where}")
    stack = Stack(layers, width, 13312, heads)
    stream = slice_of(multiprocessors)
    kept = caches(layers, batch, heads, context, width)
    x = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
    times = 25 if multiprocessors < 132 else 60

    def step() -> object:
        return stack(x, kept)

    local = timed(step, stream, times)
    yield plain(f"{where}: local step", local.median * 1e3, "ms")
    fractions = FRACTIONS if multiprocessors < 132 else (0.98, 0.96)
    for resident in fractions:
        ema.torch.stream(stack, pool, resident=resident)
        size = ema.torch.report(stack).remote_bytes
        streamed = timed(step, stream, times)
        ema.torch.unstream(stack)
        beside = timed(_beside_copies(step, size, layers), stream, times)
        again = timed(step, stream, times)
        text = f"{where}, {100 * size / stack.nbytes:.1f} % of every layer remote"
        yield from _against(text, streamed, max(again.median, beside.median), size / link, least=99)
        yield plain(f"{text}: of local speed", _percent(again.median, streamed.median), "%")


def rivals(stack: Stack, stream: Any, inputs: dict[int, Any]) -> Iterator[tuple[str, dict[int, Times]]]:  # noqa: ANN401
    """What people use today, at two sizes."""
    sizes = (2048, 24576)
    by_hand = Prefetch(stack)
    yield "plain pinned prefetch", {n: timed(partial(by_hand.step, inputs[n]), stream, 5, warm=1) for n in sizes}
    del by_hand
    copied = Stack(16, 5120, 13824, heads=40)
    copied.load_state_dict(stack.state_dict())
    cpu_offload(copied, execution_device=torch.device("cuda", 0))
    assert all(p.device.type == "meta" for p in copied.parameters()), "accelerate's hooks are not in place"
    yield "accelerate cpu_offload", {n: timed(partial(copied.__call__, inputs[n]), stream, 2, warm=1) for n in sizes}


class Prefetch:
    """Two buffers on the GPU, one copy stream, the next layer copied while this one runs: as one writes it by hand."""

    def __init__(self, stack: Stack) -> None:
        self._host = [[p.data.cpu().pin_memory() for p in layer.parameters()] for layer in stack.layers]
        self._buffers: list[Layer] = [Layer(5120, 13824, 40, torch.bfloat16).requires_grad_(False) for _ in range(2)]
        self._copies = torch.cuda.Stream()
        self._there = [torch.cuda.Event() for _ in range(2)]
        self._used = [torch.cuda.Event() for _ in range(2)]

    def step(self, x: Any) -> object:  # noqa: ANN401
        """One pass through all layers."""
        current = torch.cuda.current_stream()
        self._fetch(0)
        for number in range(len(self._host)):
            if number + 1 < len(self._host):
                self._fetch(number + 1)
            current.wait_event(self._there[number % 2])
            x = self._buffers[number % 2](x)
            self._used[number % 2].record(current)
        return x

    def _fetch(self, number: int) -> None:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._used[number % 2])
            for target, source in zip(self._buffers[number % 2].parameters(), self._host[number], strict=True):
                target.copy_(source, non_blocking=True)
            self._there[number % 2].record(self._copies)


def _beside_copies(step: Callable[[], object], size: int, pieces: int) -> Callable[[], object]:
    """The same step, with plain copies of as many bytes beside it that nothing waits for."""
    piece = size // pieces
    source = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    target = torch.empty((4, piece), dtype=torch.uint8, device="cuda")
    copies = torch.cuda.Stream()

    def both() -> object:
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            for i in range(pieces):
                target[i % 4].copy_(source, non_blocking=True)
        return step()

    return both


def _against(text: str, times: Times, local: float, moved: float, least: float) -> Iterator[Row]:
    bound = max(local, moved)
    say(f"{text}: {times}, bound {bound * 1e3:.2f} ms")
    yield at_least(least, text, _percent(bound, times.median), "% of the bound")


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole


def _steps(tokens: int) -> int:
    return 8 if tokens > 8192 else 12


if __name__ == "__main__":
    sys.exit(main())
