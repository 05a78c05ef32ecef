"""Growing beside the serving: asking for memory may take a while, and nothing waits for it.

Only growth happens here. What is not needed any more goes back at once, by who serves.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import ema

PAUSE: Final = 0.03
"""Real seconds before what was refused is asked for again."""


class Growth:
    """One kind of memory, brought up to what is wanted. Thread-safe."""

    def __init__(
        self, name: str, grow: Callable[[int], None], have: Callable[[], int], changed: threading.Event
    ) -> None:
        self._grow, self._have, self._changed = grow, have, changed
        self._condition = threading.Condition()
        self._wanted = 0
        self._refused = False
        self._closing = False
        self.failure: ema.EmaError | None = None
        self.busy = threading.Lock()
        """Held while memory grows: nothing must shrink then."""
        self._thread = threading.Thread(target=self._run, name=f"grow-{name}", daemon=True)
        self._thread.start()

    def want(self, size: int) -> None:
        """Grow to `size` real bytes, soon; a smaller size than there is changes nothing."""
        with self._condition:
            if size != self._wanted:
                self._wanted = size
                self._condition.notify_all()

    def wait(self, until: float) -> None:
        """Wait for what is wanted, to the real moment `until` at most; not at all while it is not to be had."""
        with self._condition:
            self._condition.wait_for(self._no_more_soon, max(0.0, until - time.monotonic()))

    def _no_more_soon(self) -> bool:
        return self._refused or self._closing or self._wanted <= self._have()

    def close(self) -> None:
        """Grow no more."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closing and self._wanted <= self._have():
                    self._condition.wait()
                if self._closing:
                    return
                size = self._wanted
            self._try(size)

    def _try(self, size: int) -> None:
        have = self._have()
        failure, refused = None, False
        try:
            with self.busy:
                self._grow(size)
        except (ema.PoolFull, ema.OutOfMemory, ema.InUse):
            refused = True
        except ema.EmaError as error:
            failure = error
        with self._condition:
            self._refused, self.failure = refused, failure
            self._closing |= failure is not None
            self._condition.notify_all()
            if refused:
                self._condition.wait_for(lambda: self._closing, PAUSE)
        if self._have() != have or failure is not None:
            self._changed.set()
