"""A stream that waits for an agent that is gone would wait for ever: who watches lets it pass, and says so before."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ema import errors
from ema_core import wire
from ema_driver.errors import DriverError

if TYPE_CHECKING:
    from ema.window import Slot
    from ema_driver.protocol import Words

LOOK: Final = 0.05
"""Seconds between two looks."""
PASS: Final = 0.002
"""Seconds between two rounds of letting pass."""


class Watch:
    """A sleeping thread beside streams that wait for slots."""

    def __init__(
        self, check: Callable[[], None], slots: "Sequence[Slot]", spoilt: "Words", idle: Callable[[], bool]
    ) -> None:
        """`check` raises once something is lost; `spoilt` is a page whose word 0 says so; `idle`: nothing waits."""
        self._check, self._spoilt, self._idle = check, spoilt, idle
        flags = [slot.flag for slot in slots]
        self._pool = slots[0].pool
        self._page, self._words = flags[0][0], [word for _, word in flags]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ema-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more. Twice is harmless."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK):
            try:
                self._check()
            except errors.EmaError:
                break
        else:
            return
        self._spoilt.store(0, 1)
        while not self._ended.wait(LOOK if self._idle() else PASS):
            # Each use of a slot makes it empty again, and more may be queued, be it for a later agent's page.
            for page in {id(p): p for p in (self._page, self._pool.shared)}.values():
                with suppress(DriverError):  # it is closed: nothing waits on it
                    page.fill(self._words, wire.FULL)
