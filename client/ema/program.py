"""A program: copies that are the same at every step of a model, registered once and started with one message."""

import itertools
import time
from typing import TYPE_CHECKING

from ema.tickets import Ticket
from ema_core import wire

if TYPE_CHECKING:
    from ema.pool import Pool


class Program:
    """Made by `Pool.program`. Its copies run in order; each waits for its slot and hands it over.

    Start the next step's run before this step ends: two may be under way, so that the first copies of the next one are
    made during the current one.
    """

    def __init__(self, pool: "Pool", number: int, size: int) -> None:
        self._pool = pool
        self._session = pool.session
        self.number = number
        self.size = size
        """Bytes of one run."""
        self._seq = itertools.count(1)
        self._began: float | None = None
        self.closed = False

    def start(self) -> Ticket:
        """Start a run: one message. Waits only while two are under way. Raises AgentLost, DataLost."""
        seq = next(self._seq)
        now = time.monotonic()
        if self._began is not None:
            self._pool.stepped(now - self._began)
        self._began = now
        return self._pool.start(self, self._session, seq)

    def close(self) -> None:
        """Give the program up; its runs must have ended (InUse). Twice is harmless."""
        if self.closed:
            return
        if self._session == self._pool.session and self._pool.alive:
            self._pool.ask(lambda i: wire.CloseProgram(i, self.number))
        self.closed = True
        self._pool.forget_program(self)
