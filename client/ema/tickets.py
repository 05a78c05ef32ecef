"""Tickets: copies under way, waited for on a thread or in an event loop."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ema.program import Program
    from ema.runs import Runs
    from ema_core.wire import CopyStep


class Ticket:
    """Copies that were sent to the agent: `await` it, or `wait`."""

    __slots__ = ("_runs", "of", "seq", "word")

    def __init__(self, runs: "Runs", word: int, seq: int, of: "Program | Sequence[CopyStep]") -> None:
        self._runs, self.word, self.seq, self.of = runs, word, seq, of

    @property
    def done(self) -> bool:
        """Whether all of its copies have been made."""
        return self._runs.ended(self.word, self.seq)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all of its copies have been made. Raises TimedOut, AgentLost, DataLost, BadInput."""
        self._runs.wait(self, timeout)

    def __await__(self) -> Generator[None, None, None]:
        if not self.done:
            from ema import aio  # noqa: PLC0415 - asyncio would triple the import time of who does not use it

            yield from aio.in_thread(self.wait).__await__()


class Ended(Ticket):
    """Copies that were waited for already."""

    __slots__ = ()

    def __init__(self) -> None:
        """Nothing is left to wait for."""

    @property
    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""
