"""What is scaled: one real byte stands for `size` bytes, one real second for `speed` seconds.

Link rates are scaled with both, so that every time keeps its meaning: what takes a second of the served GPU takes
`1 / speed` seconds here.
"""

from dataclasses import dataclass
from typing import Final

PAGE: Final = 4096
"""Real bytes: memory comes in whole pages of the machine underneath."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From what is shown to what is done, and back."""

    size: int
    """Bytes that one real byte stands for."""
    speed: float
    """Seconds that one real second stands for."""

    def real(self, amount: int) -> int:
        """Real bytes."""
        return amount // self.size

    def shown(self, real: int) -> int:
        """Bytes that real ones stand for."""
        return real * self.size

    def real_rate(self, rate: float) -> int:
        """Real bytes per real second."""
        return max(1, int(rate * self.speed / self.size))

    def shown_rate(self, rate: float) -> float:
        """Bytes per second that a real rate stands for."""
        return rate * self.size / self.speed


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of the run. Real ones are those of `time.monotonic`, which all processes share."""

    began: float
    """Real."""
    speed: float

    def shown(self, real: float) -> float:
        """Seconds since the run began."""
        return (real - self.began) * self.speed

    def real(self, shown: float) -> float:
        """When a moment of the run is, or was."""
        return self.began + shown / self.speed
