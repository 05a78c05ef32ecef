"""What a reclaim costs on a real GPU: `python bench/gpu_reclaim.py`.

A lender wants 8 GiB of its GPU back, lent in chunks of 256 MiB, whatever the borrower does just then. There is one GPU
here: it lends to a borrower of its own (`ema up --loopback`), whose copies then run on the GPU's multiprocessors.
Clean chunks have a true copy in host memory; dirty ones are copied there first, over PCIe.

Everything else of the GPU is in use, so the lender's memory can only be what the borrower had: that it is mapped in the
end is the driver's proof that the bytes were free.
"""

import os
import signal
import sys
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

import ema
from ema.torch.handover import handover
from ema.torch.memory import bytes_at
from lending import Lender, borrowing, lent, until
from on_gpu import GIB, MIB, link_rate, name, say, versions
from record import Row, at_most, finish, percentile, plain, record
from server import Server

CHUNK: Final = 256 * MIB
LENT: Final = 8 * GIB
COUNT: Final = LENT // CHUNK
GIBS: Final = LENT / GIB
HEADROOM: Final = 1 * GIB
SLACK: Final = 256 * MIB
"""Bytes that a borrower may use more or less than the one before."""
SLOTS: Final = 2
ROUNDS: Final = {"idle": 20, "computes": 15, "replays a graph": 15, "stopped, copies queued": 15}
KILLS, DIRTY_ROUNDS = 3, 8

SPEC: Final[dict[str, Any]] = {
    "chunkSize": CHUNK,
    "lending": {"maxPerGPU": LENT, "headroom": HEADROOM, "hysteresis": 0},
    "borrowing": {"maxPerPod": LENT},
    "reclaim": {"hostMemory": 3 * LENT, "minHold": "0s", "spillTo": ["Host"]},
}


def borrow(socket: str, doing: str, line: Connection) -> None:
    """Borrow all that can be lent; then do as told."""
    with ema.connect(socket, name="borrower") as pool:
        pool.share(CHUNK).grow(0)  # opted in: its GPU lends while it runs
        region = pool.region(LENT, timeout=30.0)
        window = pool.window(SLOTS, CHUNK)
        steps = [region.step(window[i % SLOTS], i * CHUNK) for i in range(COUNT)]
        fetch, store = pool.program(steps), pool.program(steps, store=True)
        hand, seen = handover(pool), [bytes_at(pool, slot.address, CHUNK) for slot in window.slots]
        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

        def use() -> None:
            for i in range(COUNT):
                hand.await_full(window[i % SLOTS])
                torch.mm(x, x)
                seen[i % SLOTS][:MIB].sum()
                hand.emptied(window[i % SLOTS])

        def fill() -> None:
            for i in range(COUNT):
                hand.await_empty(window[i % SLOTS])
                seen[i % SLOTS].fill_(i)
                hand.filled(window[i % SLOTS])

        with torch.cuda.stream(torch.cuda.Stream()):
            torch.mm(x, x)
            seen[0][:MIB].sum()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                use()
            if doing == "stopped, copies queued":
                fetch.start()
                fetch.start()
            line.send("ready")
            step = {"computes": use, "replays a graph": graph.replay}.get(doing)
            while step is not None and not line.poll():
                fetch.start()
                step()
                torch.cuda.current_stream().synchronize()
            while line.recv() != "end":
                run = store.start()
                fill()
                run.wait(30.0)
                line.send("stored")


def alone(pool: ema.Pool) -> float:
    """Seconds of the driver calls of one reclaim by themselves, which no agent can save: unmap and release."""
    driver = pool.driver
    handles = driver.create_many(pool.gpu, CHUNK, COUNT)
    addresses = driver.reserve_many(CHUNK, COUNT)
    driver.map(list(zip(addresses, handles, strict=True)))
    began = time.perf_counter()
    driver.unmap(addresses)
    driver.release(handles)
    took = time.perf_counter() - began
    driver.unreserve(addresses)
    return took


def clean(server: Server, lender: Lender, doing: str) -> list[Row]:
    """Of chunks that have a copy in host memory."""
    answers, whole, own, sizes = [], [], [], []
    with borrowing(server, borrow, doing) as borrower:
        if doing == "stopped, copies queued":
            until(server, lambda s: lent(s, "clean") == LENT)
            borrower.signal(signal.SIGSTOP)
        for _ in range(ROUNDS[doing]):
            until(server, lambda s: lent(s, "clean") == LENT)
            answer, _, records = lender.round()
            answers.append(answer)
            sizes.append(sum(r["bytes"] for r in records if r["clean"]))
            whole.append(max(r["seconds"] for r in records))
            own.append(max(r["own_seconds"] for r in records))
            lender.idle()
    rows = _rows(f"clean, borrower {doing}", answers, whole, own, sizes)
    for i in (4, 6):
        rows[i] = at_most(3 + GIBS, rows[i].figure, rows[i].value, "ms")
    return rows


def killed(server: Server, lender: Lender) -> list[Row]:
    """The borrower dies with copies under way, and at the same moment the lender asks."""
    answers: list[float] = []
    for _ in range(KILLS):
        with borrowing(server, borrow, "computes") as borrower:
            until(server, lambda s: lent(s, "clean") == LENT)
            borrower.signal(signal.SIGKILL)
            answers.append(lender.round(recorded=False)[0])
        lender.idle()
    prefix = "clean, borrower killed while it fetches"
    return [
        plain(f"{prefix}: rounds", KILLS, ""),
        at_most(3 + GIBS, f"{prefix}: lender asks until answer, longest", max(answers) * 1e3, "ms"),
    ]


def dirty(server: Server, lender: Lender, link: float) -> list[Row]:
    """Every chunk was stored to just before."""
    answers, whole, own, sizes, beyond = [], [], [], [], []
    with borrowing(server, borrow, "idle") as borrower:
        for _ in range(DIRTY_ROUNDS):
            until(server, lambda s: lent(s, "clean") == LENT)  # each has been copied once: host memory is taken
            borrower.ask("store")
            answer, _, records = lender.round()
            answers.append(answer)
            sizes.append(sum(r["bytes"] for r in records if not r["clean"]))
            whole.append(max(r["seconds"] for r in records))
            own.append(max(r["own_seconds"] for r in records))
            beyond.append((whole[-1] - 1.1 * sizes[-1] / link) * 1e3)
            lender.idle()
    return [
        *_rows("dirty", answers, whole, own, sizes),
        at_most(3.0, "dirty: decision until bytes back, less 1.1 × bytes / link, longest", max(beyond), "ms"),
    ]


def _rows(prefix: str, answers: list[float], whole: list[float], own: list[float], sizes: list[int]) -> list[Row]:
    say(f"{prefix}: {max(answers) * 1e3:.2f} ms")
    return [
        plain(f"{prefix}: rounds", len(answers), ""),
        plain(f"{prefix}: bytes of that kind taken, least", min(sizes) / GIB, "GiB"),
        plain(f"{prefix}: agent's own, beside its driver calls, p50", percentile(own, 50) * 1e3, "ms"),
        plain(f"{prefix}: decision until bytes back, p50", percentile(whole, 50) * 1e3, "ms"),
        plain(f"{prefix}: decision until bytes back, longest", max(whole) * 1e3, "ms"),
        plain(f"{prefix}: lender asks until answer, p50", percentile(answers, 50) * 1e3, "ms"),
        plain(f"{prefix}: lender asks until answer, longest", max(answers) * 1e3, "ms"),
    ]


def main() -> int:
    """Measure and keep."""
    link = link_rate()
    rows = [plain("link, plain pinned copies", link / 1e9, "GB/s"), plain("taken at once", GIBS, "GiB")]
    with Server(None, SPEC, "--loopback") as server, closing(Lender(server, CHUNK, LENT)) as lender:
        calls = [alone(lender.pool) for _ in range(10)]
        rows.append(plain("driver calls alone (unmap and release), p50", percentile(calls, 50) * 1e3, "ms"))
        rows.append(plain("driver calls alone (unmap and release), longest", max(calls) * 1e3, "ms"))
        with borrowing(server, borrow, "idle"):
            torch.cuda.empty_cache()
            until(server, lambda s: s["gpus"][0]["lent"] == LENT)
            free, _ = torch.cuda.mem_get_info()
        # What the borrower held is free again; it and its context come back in each round.
        until(server, lambda s: s["gpus"][0]["lent"] == 0)
        hog = torch.empty(free - HEADROOM - SLACK, dtype=torch.uint8, device="cuda")
        for doing in ROUNDS:
            rows += clean(server, lender, doing)
        rows += killed(server, lender)
        rows += dirty(server, lender, link)
        rows.append(plain("in use by others meanwhile", hog.nbytes / GIB, "GiB"))
    rows.append(plain("processes that wanted a core at the end (load average)", os.getloadavg()[0], ""))
    what = f"Reclaiming {GIBS:g} GiB in one decision, on one GPU that lends to a borrower of its own (loopback)"
    return finish(record("gpu_reclaim", what, rows, gpu=name(), versions=versions()))


if __name__ == "__main__":
    sys.exit(main())
