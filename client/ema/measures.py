"""What a client waits for and how long its steps take: counted here, and told to the agent now and then."""

import threading
import time
from typing import Final

from ema import errors
from ema_core import wire

REPORT: Final = 1.0
"""Seconds between two reports."""


class Measures:
    """Counts of one pool. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._waiters = 0
        self._waited = self._stepped = 0.0
        self._steps = 0
        self._reported = time.monotonic()
        self.exposed_wait = 0.0
        """Seconds waited for slots, in all."""

    def begin_wait(self) -> None:
        """A thread is about to wait for a word of the pages. Raises EmaError if the pool is closed."""
        with self._changed:
            if self._closed:
                raise errors.EmaError("this pool is closed")
            self._waiters += 1

    def end_wait(self) -> None:
        """It waits no more."""
        with self._changed:
            self._waiters -= 1
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Nobody begins to wait any more; return when nobody waits, or after `patience` seconds."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._waiters == 0, patience)

    def waited(self, seconds: float) -> None:
        """Count exposed waiting."""
        with self._changed:
            self.exposed_wait += seconds
            self._waited += seconds

    def stepped(self, seconds: float, steps: int) -> None:
        """Count steps."""
        with self._changed:
            self._stepped += seconds
            self._steps += steps

    def due(self, now: float) -> wire.Report | None:
        """What was counted since the last report, if that is long enough ago."""
        with self._changed:
            if now - self._reported <= REPORT:
                return None
            self._reported = now
            report = wire.Report(self._waited, self._stepped, self._steps)
            self._waited = self._stepped = 0.0
            self._steps = 0
            return report
