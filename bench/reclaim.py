"""What a reclaim costs: for the agent beside the driver's own calls, and for the lender that wants its memory back.

    python bench/reclaim.py [--no-save]

A decision takes 256 chunks at once, as 16 GiB in chunks of 64 MiB would be. Here each chunk is 64 KiB. For dirty
chunks the links are slower by the same factor of 1024, so that counts and times are those of 16 GiB over PCIe 5;
elsewhere copies are as fast as this machine moves bytes. The device process plays the copy engines: a borrower that
runs programs keeps it, and with it one core, busy.

What is counted: "decision until bytes back" begins before the plan is made and ends when the driver has released the
memory; "agent's own" is the part of it before the driver's first call; "lender asks until answer" is seen by the lender
and ends when it may map.
"""

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import ema
from ema_core.ids import HOST, Place
from ema_driver.protocol import Address
from ema_driver.sim import SimDriver
from lending import Lender, borrowing, lent, until
from record import Row, at_most, finish, percentile, plain, record
from server import Server

CHUNK = 64 << 10
SCALE = (64 << 20) // CHUNK
COUNT = 256
LENT = COUNT * CHUNK
HEADROOM = 4 << 20
BASE = 20 << 20
TOTAL = BASE + LENT + HEADROOM
PCIE = 55_400_000_000
ROUNDS, KILLS, DIRTY_ROUNDS = 100, 10, 8
OWN_MS = 2.0
"""What the agent may add to the driver's calls."""
GIBS = COUNT * SCALE * CHUNK / 2**30
ANSWER_MS = 3 + 1 * GIBS
"""What a lender may wait for clean bytes."""


def sim(*, delays: bool) -> dict[str, Any]:
    return {
        "gpus": [{"count": 2, "memory": TOTAL}],
        "granularity": CHUNK,
        "hostMemory": 1 << 30,
        "linkDelays": delays,
        "pcieRate": PCIE // SCALE,
        "latency": "0s",
    }


def pool(**lending: int) -> dict[str, Any]:
    return {
        "chunkSize": CHUNK,
        "lending": {"maxPerGPU": LENT, "headroom": HEADROOM, "hysteresis": 0, **lending},
        "borrowing": {"maxPerPod": LENT},
        "reclaim": {"hostMemory": 8 * LENT, "minHold": "0s", "spillTo": ["Host"]},
    }


# --- the borrower, in a process of its own ----------------------------------------------------------------------------


def borrow(socket: str, doing: str, line: Connection) -> None:
    """Borrow all that can be lent; then wait, run programs, or leave copies queued that nobody lets go."""
    with ema.connect(socket, gpu=1, name="borrower") as borrower:
        region = borrower.region(LENT, timeout=20.0)
        window = borrower.window(COUNT, CHUNK)
        slots = window.slots[:64]
        programs = [
            borrower.program([region.step(slot, (first + i) * CHUNK) for i, slot in enumerate(slots)])
            for first in range(0, COUNT, 64)
        ]
        store = borrower.program([region.step(slot, i * CHUNK) for i, slot in enumerate(window.slots)], store=True)
        if doing == "stopped, copies queued":
            programs[0].start()
            programs[1].start()
        line.send("ready")
        if doing == "running programs":
            while not line.poll():
                for program in programs:
                    program.start()
                    for slot in slots:
                        slot.wait(10.0)
                        slot.release()
        while (asked := line.recv()) != "end":
            for slot in window.slots:
                slot.fill()
            store.start().wait(30.0)
            line.send(asked)


# --- rounds -----------------------------------------------------------------------------------------------------------


class Alone:
    """The driver calls of one reclaim, by themselves: what no agent can save."""

    def __init__(self, server: Server) -> None:
        self.driver = SimDriver.connect(server.device_socket)
        base = self.driver.reserve(LENT)
        self.addresses = [Address(base + i * CHUNK) for i in range(COUNT)]

    def seconds(self) -> float:
        """Unmap and release, of memory that was just made."""
        driver = self.driver
        handles = [driver.create(Place(HOST), CHUNK) for _ in range(COUNT)]
        driver.map(list(zip(self.addresses, handles, strict=True)))
        began = time.perf_counter()
        driver.unmap(self.addresses)
        driver.release(handles)
        return time.perf_counter() - began

    @staticmethod
    def wake() -> float:
        """Seconds until a thread that waits has been woken and has answered: what this machine's noise costs."""
        ask, answer = threading.Event(), threading.Event()

        def wait() -> None:
            ask.wait()
            answer.set()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(1e-3)  # it waits by now
        began = time.perf_counter()
        ask.set()
        answer.wait()
        took = time.perf_counter() - began
        thread.join()
        return took

    def close(self) -> None:
        """End the session."""
        self.driver.close()


def clean(server: Server, doing: str) -> list[Row]:
    lender, alone = Lender(server, BASE, LENT), Alone(server)
    answers, grows, whole, own, driver, wakes = [], [], [], [], [], []
    with borrowing(server, borrow, doing) as borrower:
        if doing == "stopped, copies queued":
            until(server, lambda s: lent(s, "clean") == LENT)
            borrower.signal(signal.SIGSTOP)
        for _ in range(ROUNDS):
            until(server, lambda s: lent(s, "clean") == LENT)
            driver.append(alone.seconds())
            wakes.append(alone.wake())
            answer, took, records = lender.round()
            answers.append(answer)
            grows.append(took)
            if sum(r["bytes"] for r in records if r["clean"]) == LENT:
                whole.append(max(r["seconds"] for r in records))
                own.append(max(r["own_seconds"] for r in records))
            lender.idle()
    lender.close()
    alone.close()
    prefix = f"clean, borrower {doing}: "
    rows = [plain(f"{prefix}rounds, of which all was clean and taken at once", len(whole), "")]
    for name, values in (
        ("a bare thread woken", wakes),
        ("driver calls alone", driver),
        ("decision until bytes back", whole),
        ("share.grow until mapped", grows),
        ("agent's own, beside its driver calls", own),
        ("lender asks until answer", answers),
    ):
        rows.append(plain(f"{prefix}{name}, p50", percentile(values, 50) * 1e3, "ms"))
        rows.append(plain(f"{prefix}{name}, p99", percentile(values, 99) * 1e3, "ms"))
    rows[-3] = at_most(OWN_MS, rows[-3].figure, rows[-3].value, "ms")
    rows[-1] = at_most(ANSWER_MS, rows[-1].figure, rows[-1].value, "ms")
    return rows


def killed(server: Server) -> list[Row]:
    """The borrower dies with copies queued, and at the same moment the lender asks."""
    lender, alone, answers, own, wakes = Lender(server, BASE, LENT), Alone(server), [], [], []
    for _ in range(KILLS):
        with borrowing(server, borrow, "stopped, copies queued") as borrower:
            until(server, lambda s: lent(s, "clean") == LENT)
            wakes.append(alone.wake())
            borrower.signal(signal.SIGKILL)
            answer, _, records = lender.round(recorded=False)
            answers.append(answer)
            own += [r["own_seconds"] for r in records if r["clean"]]
        lender.idle()
    lender.close()
    alone.close()
    prefix = "clean, borrower killed, copies queued: "
    if not own:
        raise SystemExit("no decision took a chunk of a borrower that was killed: its end came first each time")
    return [
        plain(f"{prefix}decisions that took chunks", len(own), ""),
        plain(f"{prefix}a bare thread woken, p50", percentile(wakes, 50) * 1e3, "ms"),
        plain(f"{prefix}a bare thread woken, longest", max(wakes) * 1e3, "ms"),
        plain(f"{prefix}agent's own, beside its driver calls, p50", percentile(own, 50) * 1e3, "ms"),
        at_most(OWN_MS, f"{prefix}agent's own, beside its driver calls, longest", max(own) * 1e3, "ms"),
        plain(f"{prefix}lender asks until answer, p50", percentile(answers, 50) * 1e3, "ms"),
        at_most(ANSWER_MS, f"{prefix}lender asks until answer, longest", max(answers) * 1e3, "ms"),
    ]


def dirty(server: Server) -> list[Row]:
    """Every chunk was stored to since it was last copied, but for the few that slow cleaning reaches."""
    lender, whole, beyond, answers, sizes = Lender(server, BASE, LENT), [], [], [], []
    with borrowing(server, borrow, "idle") as borrower:
        for _ in range(DIRTY_ROUNDS):
            until(server, lambda s: lent(s, "clean") + lent(s, "dirty") == LENT)
            borrower.ask("store")
            answer, _, records = lender.round()
            size = sum(r["bytes"] for r in records if not r["clean"])
            took = max(r["seconds"] for r in records)
            sizes.append(size / LENT)
            answers.append(answer)
            whole.append(took)
            beyond.append(took - 1.1 * size * SCALE / PCIE)
            lender.idle()
    lender.close()
    return [
        plain("dirty: share of the bytes that were dirty, least", min(sizes) * 100, "%"),
        plain("dirty: decision until bytes back, p50", percentile(whole, 50) * 1e3, "ms"),
        plain("dirty: decision until bytes back, longest", max(whole) * 1e3, "ms"),
        at_most(3.0, "dirty: the same less 1.1 × dirty bytes / link, longest", max(beyond) * 1e3, "ms"),
        plain("dirty: lender asks until answer, p50", percentile(answers, 50) * 1e3, "ms"),
        plain("dirty: rounds", DIRTY_ROUNDS, ""),
    ]


def main() -> int:
    rows: list[Row] = []
    with Server(sim(delays=False), pool()) as server:
        for doing in ("idle", "running programs", "stopped, copies queued"):
            rows += clean(server, doing)
        rows += killed(server)
    with Server(sim(delays=True), pool(maxTraffic=LENT // 2)) as server:
        rows += dirty(server)
    rows.append(plain("processes that wanted a core at the end (load average)", os.getloadavg()[0], ""))
    what = f"Reclaiming {COUNT} chunks in one decision: {GIBS:g} GiB of 64 MiB chunks, modelled by 64 KiB each"
    return finish(record("reclaim", what, rows))


if __name__ == "__main__":
    sys.exit(main())
