"""A program: copies that are the same at every step of a model, registered once and started with one message."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ema import errors
from ema.tickets import Ticket
from ema_core import wire
from ema_core.wire import CopyStep

if TYPE_CHECKING:
    from ema.link import Link

COUNTED: Final = 0.1
"""Seconds of steps that are counted together: a count takes a lock, and a step has none to spare."""


class Program:
    """Made by `Pool.program`. Its copies run in order; each waits for its slot and hands it over.

    Start the next step's run before this step ends: two may be under way, so that the first copies of the next one are
    made during the current one.
    """

    def __init__(self, pool: "Link", number: int, steps: Sequence[CopyStep], size: int) -> None:
        self._pool = pool
        self._runs = pool.runs
        self.number = number
        self.steps = steps
        self.slots = frozenset(s.slot for s in steps)
        self.regions = frozenset(s.region for s in steps)
        self.size = size
        """Bytes of one run."""
        self._began: float | None = None
        """When the steps that are not counted yet began."""
        self._steps = 0
        self.closed = False

    def start(self) -> Ticket:
        """Start a run: one message. Waits only while two are under way.

        Raises AgentLost, DataLost, EmaError (closed).
        """
        if self.closed:
            raise errors.EmaError(f"program {self.number} is closed")
        pool = self._pool
        if self._runs is not pool.runs:
            raise errors.AgentLost(f"program {self.number} was lost with the agent that ran it; make it again")
        pool.check_lost(self.regions)
        now = time.monotonic()
        if self._began is None:
            self._began = now
        elif now - self._began > COUNTED:
            pool.stepped(now - self._began, self._steps, now)
            self._began, self._steps = now, 0
        self._steps += 1
        if pool.orphans:
            pool.orphans -= self.slots
        return self._runs.start(self)

    @property
    def started(self) -> int:
        """How many runs have been started under its number."""
        return self._runs.started(self)

    def close(self) -> None:
        """Give the program up; its runs must have ended (InUse). Twice is harmless."""
        if self.closed:
            return
        if self._runs is self._pool.runs and self._pool.alive:
            self._runs.settle(self.slots)
            self._pool.ask(lambda i: wire.CloseProgram(i, self.number))
        self.closed = True
        self._pool.forget_program(self)
