"""The one order in which slots are handed over, whichever stream computes, and how long it waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

_PENDING: Final = 64
"""Pairs of events after which those that have come are counted."""


class Lane:
    """On the CPU the order is that of the calls. On a GPU it is that of one stream: the first that is seen.

    What runs on another stream waits for it, and it for that one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = 0.0

    @property
    def here(self) -> bool:
        """Whether that is the order of what the caller does itself."""
        return self._stream is None or self._stream == torch.cuda.current_stream(self._device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work for the slots."""
        if self._device.type != "cuda":
            yield
            return
        here = torch.cuda.current_stream(self._device)
        lane = self._stream = self._stream or here
        if here == lane and torch.cuda.current_device() == self._device.index:
            yield
            return
        lane.wait_stream(here)
        with torch.cuda.stream(lane):  # and its device
            yield
        here.wait_stream(lane)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for a slot, whose time on the GPU is counted."""
        if self._device.type != "cuda":
            yield  # counted by the slot
            return
        if len(self._pending) >= _PENDING:
            self._count()
        begin, end = self._spare.pop() if self._spare else (_event(), _event())
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    @property
    def waited(self) -> float:
        """Seconds that the GPU waited for slots, of what it has done so far."""
        self._count()
        return self._waited

    def _count(self) -> None:
        while self._pending and self._pending[0][1].query():
            pair = self._pending.pop(0)
            self._waited += pair[0].elapsed_time(pair[1]) / 1e3
            self._spare.append(pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
