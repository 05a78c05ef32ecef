"""Tickets: copies under way, waited for on a thread or in an event loop."""

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ema.pool import Pool


class Ticket:
    """Copies that were sent to the agent."""

    def __init__(self, pool: "Pool", word: int, seq: int) -> None:
        self._pool, self._word, self._seq = pool, word, seq

    @property
    def done(self) -> bool:
        """Whether all of its copies have been made."""
        return self._pool.run_ended(self._word, self._seq)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all of its copies have been made. Raises TimedOut, AgentLost, DataLost."""
        self._pool.wait_run(self._word, self._seq, timeout)

    def __await__(self) -> Generator[None, None, None]:
        if not self.done:
            yield from asyncio.to_thread(self.wait).__await__()


class Ended(Ticket):
    """Copies that were waited for already."""

    def __init__(self) -> None:
        """Nothing is left to wait for."""

    @property
    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""
