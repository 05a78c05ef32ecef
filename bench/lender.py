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
from dataclasses import dataclass, field
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
CALM, BUSY = 600, 500
"""Steps between bursts and in one: a burst about every three seconds."""
TURNS: Final = 4

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


@dataclass(slots=True)
class Seen:
    """What one way of holding the memory came to, turn by turn."""

    rates: list[float] = field(default_factory=list)
    """Rows per second."""
    grows: list[float] = field(default_factory=list)
    """Seconds until a burst's memory was there."""
    steps: list[float] = field(default_factory=list)
    """Seconds."""


class Work:
    """Steps of a model, with more rows and more memory in a burst."""

    def __init__(self) -> None:
        self.stack = Stack(4, 8192, 22016, 64)
        self.x: Any = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16)

    def turn(self, seen: Seen, burst: Callable[[], list[Any]], calm: Callable[[], None]) -> None:
        """A burst and the calm after it."""
        began = time.perf_counter()
        pages = burst()
        seen.grows.append(time.perf_counter() - began)
        rows = self._steps(seen, BUSY, 512, pages)
        del pages
        calm()
        rows += self._steps(seen, CALM, 256, [])
        seen.rates.append(rows / (time.perf_counter() - began))

    def _steps(self, seen: Seen, count: int, rows: int, pages: list[Any]) -> int:
        for number in range(count):
            before = time.perf_counter()
            with torch.inference_mode():
                self.stack(self.x[:rows])
                if pages:
                    pages[number % len(pages)].fill_(number % 251)  # the keys and values of these rows
            torch.cuda.current_stream().synchronize()  # a server looks at every token
            seen.steps.append(time.perf_counter() - before)
        return rows * count


def pages_of(pool: ema.Pool, share: Share) -> list[Any]:
    """The share's pages as tensors."""
    return [bytes_at(pool, share.address(i), CHUNK) for i in range(share.local // CHUNK)]


HELD, SHARED, LENT = "all held from the start", "share, nobody borrows", "share, lent and taken back"


def main() -> int:
    """Measure and keep."""
    with ExitStack() as ends:
        server = ends.enter_context(Server(None, SPEC, "--loopback"))
        pool = ends.enter_context(ema.connect(server.socket, gpu=0, name="lender"))
        share = ends.enter_context(closing(pool.share(BURST + CHUNK)))
        share.grow(CHUNK)
        seen, refused = _turns(server, pool, share)
        gpu = server.status()["gpus"][0]
        reclaimed = [r for r in server.status()["counted"]["recent_reclaims"] if r["clean"]]
    rows: list[Row] = []
    for label, each in seen.items():
        middle = statistics.median(each.rates)
        rows += [
            plain(f"{label}: rows per second", middle, "1/s"),
            plain(f"{label}: spread of {TURNS} turns", 100 * (max(each.rates) - min(each.rates)) / middle, "%"),
            plain(f"{label}: a burst's memory is there after, longest", 1e3 * max(each.grows), "ms"),
            plain(f"{label}: step p50", 1e3 * percentile(each.steps, 50), "ms"),
            plain(f"{label}: step p99", 1e3 * percentile(each.steps, 99), "ms"),
        ]
    kept = {other: _ratio(seen[LENT], seen[other]) for other in (HELD, SHARED)}
    rows += [
        at_least(99.0, "lent and taken back, of nobody borrows (median of the turns' ratios)", kept[SHARED], "%"),
        plain("lent and taken back, of all held from the start", kept[HELD], "%"),
        plain("of what bursts needed, taken back", 100 * sum(r["bytes"] for r in reclaimed) / TURNS / BURST, "%"),
        plain("decision until bytes back, p50", 1e3 * percentile([r["seconds"] for r in reclaimed], 50), "ms"),
        at_most(0, "seconds with less than the headroom free", gpu["shortfall_seconds"], "s"),
        at_most(0, "bursts that were out of memory", refused, ""),
    ]
    what = (
        f"A lender's throughput with a burst of {BURST / GIB:g} GiB every {_period(seen[LENT]):.1f} s, "
        "on one GPU that lends to a client of its own (loopback)"
    )
    return finish(record("lender", what, rows, gpu=name(), versions=versions()))


def _ratio(one: Seen, other: Seen) -> float:
    return 100 * statistics.median(a / b for a, b in zip(one.rates, other.rates, strict=True))


def _period(seen: Seen) -> float:
    return (sum(seen.steps) + sum(seen.grows)) / TURNS


def _turns(server: Server, pool: ema.Pool, share: Share) -> tuple[dict[str, Seen], int]:
    """All three ways by turns; and how often the share was out of memory."""
    seen = {label: Seen() for label in (HELD, SHARED, LENT)}
    work, refused = Work(), 0

    def grow() -> list[Any]:
        nonlocal refused
        try:
            share.grow(CHUNK + BURST, timeout=5.0)
        except ema.OutOfMemory as error:
            say(str(error))
            refused += 1
        return pages_of(pool, share)

    def shrink() -> None:
        torch.cuda.synchronize()
        share.shrink(CHUNK)

    work.turn(Seen(), list, lambda: None)  # warm
    for number in range(TURNS):
        held = grow()
        work.turn(seen[HELD], held.copy, lambda: None)
        held.clear()
        shrink()
        work.turn(seen[SHARED], grow, shrink)
        with borrowing(server, borrow, ""):
            until(server, lambda s: s["gpus"][0]["states"].get("clean", 0) == BURST)
            free, _ = torch.cuda.mem_get_info()
            hog = torch.empty(free - HEADROOM - SLACK, dtype=torch.uint8, device="cuda")
            work.turn(seen[LENT], grow, shrink)
            del hog
            torch.cuda.empty_cache()
        until(server, lambda s: s["gpus"][0]["lent"] == 0)
        say(f"turn {number + 1}: " + ", ".join(f"{label} {each.rates[-1]:.0f}" for label, each in seen.items()))
    return seen, refused


if __name__ == "__main__":
    sys.exit(main())
