"""How long steps take: on a GPU by events in its stream, which nobody waits for; on the CPU by its clock."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import torch

KEPT: Final = 32
"""Steps that are remembered."""
_PAIRS: Final = 8
"""Steps under way on a GPU that are timed; more go untimed."""


class Clock(Protocol):
    """Times steps, one at a time."""

    times: deque[float]
    """Seconds of the last steps."""

    def start(self) -> None:
        """A step begins."""
        ...

    def stop(self) -> None:
        """It ends."""
        ...

    def forget(self) -> None:
        """Steps are of another kind from now on."""
        ...


def clock(device: torch.device) -> Clock:
    """For steps on this device."""
    return _Events(device) if device.type == "cuda" else _OfCpu()


def typical(times: Sequence[float]) -> float:
    """Seconds of a step as most are; 0 where none are known."""
    return statistics.median(times) if times else 0.0


def undisturbed(times: Sequence[float]) -> float:
    """Seconds of a step that nothing held up: the lower quartile, since what disturbs only adds."""
    return sorted(times)[len(times) // 4]


class _OfCpu:
    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=KEPT)
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()

    def stop(self) -> None:
        self.times.append(time.monotonic() - self._began)

    def forget(self) -> None:
        self.times.clear()


class _Events:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: deque[float] = deque(maxlen=KEPT)
        self._free = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(_PAIRS)]
        self._under_way: deque[tuple[torch.cuda.Event, ...]] = deque()
        self._now: tuple[torch.cuda.Event, ...] | None = None
        self._skip = 0
        """Of those under way, how many are to be forgotten."""
        # Around a compiled model these are called, not traced: the events are taken on the stream as it is.
        self.start, self.stop = torch.compiler.disable(self._start), torch.compiler.disable(self._stop)

    def _start(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            pair = self._under_way.popleft()
            if self._skip:
                self._skip -= 1
            else:
                self.times.append(pair[0].elapsed_time(pair[1]) / 1e3)
            self._free.append(pair)
        self._now = self._free.pop() if self._free else None
        if self._now is not None:
            self._now[0].record(torch.cuda.current_stream(self._device))

    def _stop(self) -> None:
        if self._now is not None:
            self._now[1].record(torch.cuda.current_stream(self._device))
            self._under_way.append(self._now)
            self._now = None

    def forget(self) -> None:
        self.times.clear()
        self._skip = len(self._under_way)
