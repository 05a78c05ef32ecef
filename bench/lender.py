"""What a lender loses while its memory is lent and taken back: `python bench/lender.py`. Needs a GPU.

A process computes (steps of a transformer's layer over a batch that comes in bursts: in a burst it has twice the rows,
and their keys and values lie in memory of its `pool.share`). Three ways, by turns, again and again: all memory held
from the start; a share that grows and shrinks while nobody borrows; the same share while all that is idle is lent to
another process, and taken back at each burst. There is one GPU here, which lends to a client of its own
(`ema up --loopback`). The borrower fetches nothing while the lender is measured: on one GPU its copies would run on the
lender's multiprocessors, as no neighbour's do.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

import ema
from ema.share import Share
from ema.torch.memory import bytes_at
from lending import borrowing, until
from on_gpu import GIB, MIB, name, say, versions
from record import Row, at_least, at_most, finish, percentile, plain, record
from server import Server
from stacks import Stack

CHUNK: Final = 64 * MIB
BURST: Final = 4 * GIB
"""Bytes that a burst needs beside what is always in use."""
HEADROOM: Final = 2 * GIB
SLACK: Final = 256 * MIB
CALM, BUSY = 120, 120
"""Steps between bursts and in one."""
BURSTS: Final = 3
"""Of one turn."""
TURNS: Final = 7

SPEC: Final[dict[str, Any]] = {
    "chunkSize": CHUNK,
    "lending": {"maxPerGPU": BURST, "headroom": HEADROOM, "hysteresis": 0},
    "borrowing": {"maxPerPod": BURST},
    "reclaim": {"hostMemory": 2 * BURST, "minHold": "0s", "spillTo": ["Host"]},
}


def borrow(socket: str, _: str, line: Connection) -> None:
    """Borrow all that can be lent, store to it once, and keep it."""
    with ema.connect(socket, name="borrower") as pool:
        pool.share(CHUNK).grow(0)
        region = pool.region(BURST, timeout=30.0)
        window = pool.window(1, CHUNK)
        for at in range(0, BURST, CHUNK):
            window[0].fill()
            region.store(window[0], at=at).wait(30.0)
        line.send("ready")
        line.recv()


class Work:
    """Steps, and what bursts take. `took` are the seconds of each step, `grows` of each growth."""

    def __init__(self) -> None:
        self.stack = Stack(4, 8192, 22016, 64)
        self.x: Any = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16)
        self.took: list[float] = []
        self.grows: list[float] = []
        self.refused = 0

    def turn(self, burst: Callable[[], list[Any]], calm: Callable[[], None]) -> float:
        """Some bursts; rows per second."""
        rows = 0
        began = time.perf_counter()
        for _ in range(BURSTS):
            rows += self._steps(CALM, 256, [])
            asked = time.perf_counter()
            pages = burst()
            self.grows.append(time.perf_counter() - asked)
            rows += self._steps(BUSY, 512, pages)
            del pages
            calm()
        return rows / (time.perf_counter() - began)

    def _steps(self, count: int, rows: int, pages: list[Any]) -> int:
        for number in range(count):
            before = time.perf_counter()
            with torch.inference_mode():
                self.stack(self.x[:rows])
                if pages:
                    pages[number % len(pages)].fill_(number % 251)  # the keys and values of these rows
            torch.cuda.current_stream().synchronize()  # a server looks at every token
            self.took.append(time.perf_counter() - before)
        return rows * count


def pages_of(pool: ema.Pool, share: Share) -> list[Any]:
    """The share's pages as tensors."""
    return [bytes_at(pool, share.address(i), CHUNK) for i in range(share.local // CHUNK)]


def main() -> int:
    """Measure and keep."""
    with ExitStack() as ends:
        server = ends.enter_context(Server(None, SPEC, "--loopback"))
        pool = ends.enter_context(ema.connect(server.socket, gpu=0, name="lender"))
        share = ends.enter_context(closing(pool.share(BURST + CHUNK)))
        share.grow(CHUNK)
        work = Work()
        rates, longest = _turns(server, pool, share, work)
        gpu = server.status()["gpus"][0]
        reclaimed = [r for r in server.status()["counted"]["recent_reclaims"] if r["clean"]]
    taken = sum(r["bytes"] for r in reclaimed)
    base = statistics.median(rates["share, nobody borrows"])
    lent = statistics.median(rates["share, lent and taken back"])
    paired = [b / a for a, b in zip(rates["share, nobody borrows"], rates["share, lent and taken back"], strict=True)]
    rows: list[Row] = []
    for label, values in rates.items():
        spread = (max(values) - min(values)) / statistics.median(values)
        rows.append(plain(f"{label}: rows per second", statistics.median(values), "1/s"))
        rows.append(plain(f"{label}: spread of {len(values)} turns, of the median", 100 * spread, "%"))
        rows.append(plain(f"{label}: a burst's memory is there after, longest", 1e3 * longest[label], "ms"))
    rows += [
        at_least(99.0, "lent and taken back, of nobody borrows: median of the turns' ratios",
                 100 * statistics.median(paired), "%"),
        plain("lent and taken back, of nobody borrows: ratio of medians", 100 * lent / base, "%"),
        plain("lent and taken back, of all held from the start",
              100 * lent / statistics.median(rates["all held from the start"]), "%"),
        plain("bursts while lent", TURNS * BURSTS, ""),
        plain("of what they needed, taken back", 100 * taken / (TURNS * BURSTS * BURST), "%"),
        plain("decision until bytes back, p50", 1e3 * percentile([r["seconds"] for r in reclaimed], 50), "ms"),
        at_most(0, "seconds with less than the headroom free", gpu["shortfall_seconds"], "s"),
        at_most(0, "bursts that were out of memory", work.refused, ""),
    ]  # fmt: skip
    what = f"A lender's throughput with bursts of {BURST / GIB:g} GiB, on one GPU that lends to a client of its own"
    return finish(record("lender", what, rows, gpu=name(), versions=versions()))


def _turns(server: Server, pool: ema.Pool, share: Share, work: Work) -> tuple[dict[str, list[float]], dict[str, float]]:
    rates: dict[str, list[float]] = {}
    longest: dict[str, float] = {}

    def turn(label: str, burst: Callable[[], list[Any]], calm: Callable[[], None]) -> None:
        work.grows.clear()
        rates.setdefault(label, []).append(work.turn(burst, calm))
        longest[label] = max(longest.get(label, 0.0), *work.grows)

    def grow() -> list[Any]:
        try:
            share.grow(CHUNK + BURST, timeout=5.0)
        except ema.OutOfMemory as error:
            say(str(error))
            work.refused += 1
        return pages_of(pool, share)

    def shrink() -> None:
        torch.cuda.synchronize()
        share.shrink(CHUNK)

    work.turn(list, lambda: None)  # warm
    for number in range(TURNS):
        held = grow()
        turn("all held from the start", lambda held=held: held, lambda: None)  # type: ignore[misc]
        del held
        shrink()
        turn("share, nobody borrows", grow, shrink)
        with borrowing(server, borrow, ""):
            until(server, lambda s: s["gpus"][0]["states"].get("clean", 0) == BURST)
            free, _ = torch.cuda.mem_get_info()
            hog = torch.empty(free - HEADROOM - SLACK, dtype=torch.uint8, device="cuda")
            turn("share, lent and taken back", grow, shrink)
            del hog
            torch.cuda.empty_cache()
        until(server, lambda s: s["gpus"][0]["lent"] == 0)
        say(f"turn {number + 1}: " + ", ".join(f"{label} {values[-1]:.0f}" for label, values in rates.items()))
    return rates, longest


if __name__ == "__main__":
    sys.exit(main())
