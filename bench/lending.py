"""Both sides of lending, as the benchmarks of reclaims play them: a lender, and a borrower in a process of its own."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import ema
from ema.share import Share
from server import Server

Borrow = Callable[[str, str, Connection], None]
"""A borrower's life, given the client socket, what it does, and the line to the benchmark: it says "ready" when it has
its memory, and obeys until "end"."""


class Borrower:
    """The benchmark's end of the line to a borrower."""

    def __init__(self, server: Server, borrow: Borrow, doing: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, there = context.Pipe()
        self.process = context.Process(target=borrow, args=(server.socket, doing, there), daemon=True)
        self.process.start()
        there.close()
        self.line.recv()

    def ask(self, what: str) -> None:
        """Have it do something, and wait until it has."""
        self.line.send(what)
        self.line.recv()

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Let it end, or end it."""
        self.signal(signal.SIGCONT)
        try:
            self.line.send("end")
            self.process.join(10.0)
        except BrokenPipeError:
            pass  # it was killed
        self.process.kill()
        self.process.join()
        self.line.close()


@contextmanager
def borrowing(server: Server, borrow: Borrow, doing: str) -> Iterator[Borrower]:
    """A borrower that has got its memory."""
    made = Borrower(server, borrow, doing)
    try:
        yield made
    finally:
        made.end()


class Lender:
    """A process' own GPU (number 0): it wants everything back, then leaves it idle again."""

    def __init__(self, server: Server, base: int, lent: int) -> None:
        """`base` bytes it always uses; `lent` more it wants now and then."""
        self.server, self.base, self.lent = server, base, lent
        self.pool = ema.connect(server.socket, gpu=0, name="lender")
        self.share = self.pool.share(base + lent)
        self.share.grow(base)

    def round(self, *, recorded: bool = True) -> tuple[float, float, list[dict[str, Any]]]:
        """Want it all: seconds of the agent's answer and until all was mapped, and the agent's own records of it.

        All of them, if not `recorded` is False: of a borrower that is gone there may be none.
        """
        before = self.server.status()
        count, size = len(before["counted"]["recent_reclaims"]), sum(g["lent"] for g in before["gpus"])
        asked = self.pool.ask_share
        answered = 0.0

        def ask(share: Share, size: int, timeout: float) -> None:
            nonlocal answered
            began = time.perf_counter()
            asked(share, size, timeout)
            answered = time.perf_counter() - began

        with mock.patch.object(self.pool, "ask_share", ask):
            began = time.perf_counter()
            self.share.grow(self.base + self.lent, timeout=20.0)
            took = time.perf_counter() - began
        until(self.server, gone)

        def records(status: dict[str, Any]) -> list[dict[str, Any]]:
            return list(status["counted"]["recent_reclaims"][count:])

        if recorded:
            until(self.server, lambda s: sum(r["bytes"] for r in records(s)) >= size)
        return answered, took, records(self.server.status())

    def idle(self) -> None:
        """Back to the base."""
        self.share.shrink(self.base)

    def close(self) -> None:
        """Leave."""
        self.pool.close()


def until(server: Server, true: Callable[[dict[str, Any]], bool], seconds: float = 30.0) -> None:
    """Wait until it is true of the agent's status."""
    end = time.monotonic() + seconds
    while not true(server.status()):
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:g} s in vain: {server.status()['gpus']}")
        time.sleep(0.01)


def lent(status: dict[str, Any], state: str) -> int:
    """Bytes of GPU 0 that are lent and in this state."""
    gpu = next(g for g in status["gpus"] if g["index"] == 0)
    return int(gpu["states"].get(state, 0))


def gone(status: dict[str, Any]) -> bool:
    """No GPU lends anything."""
    return not any(g["lent"] for g in status["gpus"])
