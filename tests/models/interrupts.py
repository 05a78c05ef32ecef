"""Ctrl-C at any line of the client library."""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupt(after: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt after so many lines of the client library have run on this thread."""
    lines = [0]

    def line(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - as `settrace` has it
        # At the ends of a `with` and where a `try` begins, lines are traced but no signal is ever handled.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event != "line" or source.lstrip().startswith(("with ", "try:")):
            return line
        lines[0] += 1
        if lines[0] == after:
            sys.settrace(None)
            lines[0] += 1
            raise KeyboardInterrupt
        return line

    def call(frame: FrameType, _event: str, _: object) -> Any:  # noqa: ANN401
        return line if "/client/ema/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def lines_of(action: Callable[[], object]) -> int:
    with interrupt(-1) as lines:
        action()
    return lines[0]
