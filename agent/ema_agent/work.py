"""Work under way: driver calls on worker threads, and the pieces of work on the loop that wait for them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from ema_core.ids import Place

T = TypeVar("T")
WORKERS: Final = 4
APART: Final = 16
"""Threads for driver calls that may be held up by copies queued elsewhere."""


class Work:
    """Belongs to the agent's loop."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended_one = ended
        """Called on the loop whenever a piece of work has ended."""
        self.failed: Callable[[BaseException], None] = _raise
        """Called on the loop with what no piece of work may raise: the ledger is right no more."""
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="ema-move")
        self._apart = ThreadPoolExecutor(APART, thread_name_prefix="ema-apart")
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[Place, set[asyncio.Task[None]]] = defaultdict(set)

    @property
    def under_way(self) -> bool:
        """Whether any piece of work has not ended."""
        return bool(self._tasks)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking driver work on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, lambda: work(*args))

    async def apart(self, work: Callable[[], T]) -> T:
        """Run a driver call that others' queued copies may hold up, where it holds up nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._apart, work)

    def start(self, work: Coroutine[Any, Any, None], leaving: Place | None = None) -> None:
        """Begin a piece of work on the loop; `leaving` is a place that it frees memory of."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if leaving is not None:
            self._leaving[leaving].add(task)
        task.add_done_callback(lambda t: self._ended(t, leaving))

    async def freeing(self, place: Place) -> None:
        """Wait until what is leaving a place just now has left."""
        if leaving := [t for t in self._leaving[place] if t is not asyncio.current_task()]:
            await asyncio.wait(leaving)

    def done(self, task: "asyncio.Task[None]") -> None:
        """A piece of work on the ledger has ended: with what it may not raise, the agent has to end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    async def stop(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._workers.shutdown(wait=True)
        self._apart.shutdown(wait=False)

    def _ended(self, task: "asyncio.Task[None]", leaving: Place | None) -> None:
        self._tasks.discard(task)
        if leaving is not None:
            self._leaving[leaving].discard(task)
        self._ended_one()
        self.done(task)


def _raise(error: BaseException) -> None:
    raise error
