"""The watch: a thread that reads memory every few milliseconds, so that a lender's own demand is seen at once.

The agent's loop never waits for a driver query: one that hangs costs fresh numbers, not the agent. While readings are
old, the agent says so and grants nothing.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ema_agent.node import Node
from ema_core.ids import Place
from ema_driver.errors import ContextLost, DriverError
from ema_driver.protocol import MemoryDriver, MemoryInfo

PERIOD: Final = 0.005
"""Seconds between two readings while something is lent or waited for."""
REST: Final = 0.05
"""Seconds between two readings while there is nothing to guard."""
OLD: Final = 1.0
"""Seconds after which a reading is too old to grant anything by."""


class Watch:
    """Reads memory on its own thread and hands readings to the loop."""

    def __init__(
        self, driver: MemoryDriver, node: Node, fresh: Callable[[], bool], broken: Callable[[str], None]
    ) -> None:
        self._driver, self._node = driver, node
        self._fresh = fresh
        """Called on the loop after a reading that differs from the last; True if it wants the next one in any case."""
        self._broken = broken
        """Called on the loop when the driver session is lost for good."""
        self._loop = asyncio.get_running_loop()
        self._look = threading.Event()
        self._stop = False
        self._last: tuple[object, object] = None, None
        self._wanted = True
        self.read_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ema-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def look_now(self) -> None:
        """Do not wait for the next period."""
        self._look.set()

    @property
    def age(self) -> float:
        """Seconds since the last reading."""
        return time.monotonic() - self.read_at

    def stop(self) -> None:
        """End; a query that hangs is left behind."""
        self._stop = True
        self._look.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop:
            asked = self._look.wait(PERIOD if self._wanted or self._node.lends else REST)
            self._look.clear()
            quiet = self._node.quiet()
            try:
                memory = self._driver.memory()
            except ContextLost as error:
                self._tell(partial(self._broken, str(error)))
                return
            except DriverError:
                continue
            late = self.age > OLD
            self.read_at = time.monotonic()
            if late or asked or self._wanted or self._last != (memory, quiet):
                self._last = memory, quiet
                self._tell(partial(self._take, memory, quiet))

    def _tell(self, what: Callable[[], None]) -> None:
        if not self._stop:
            try:
                self._loop.call_soon_threadsafe(what)
            except RuntimeError:
                self._stop = True  # the loop is closed

    def _take(self, memory: Mapping[Place, MemoryInfo], quiet: Mapping[Place, int]) -> None:
        self._node.take(memory, quiet)
        self._wanted = self._fresh()
