"""Ending in order: Ctrl-C, a closed terminal, a polite kill are one KeyboardInterrupt, never while a process starts."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stop:
    def __init__(self) -> None:
        self.held = False
        self.asked = False

    def hear(self, _number: int, _frame: FrameType | None) -> None:
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)  # what ends everything is not to be stopped itself
        self.asked = True
        if not self.held:
            raise KeyboardInterrupt


_stop = _Stop()


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, a wish to stop is KeyboardInterrupt."""
    before = {number: signal.signal(number, _stop.hear) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _stop.asked = False


@contextmanager
def undivided() -> Iterator[None]:
    """Inside, nothing stops: a process that was started and that nobody knows of would be left behind."""
    _stop.held = True
    try:
        yield
    finally:
        _stop.held = False
    if _stop.asked:
        raise KeyboardInterrupt
