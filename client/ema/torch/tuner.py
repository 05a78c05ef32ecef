"""How many bytes hide behind a step: reckoned from time and rate first, then found by trying."""

from typing import Final

MARGIN: Final = 0.8
"""Part of what should hide that is tried first."""
TOLERANCE: Final = 0.05
"""Part of a local step by which a step may be longer and still count as one in which all hides."""
GROWTH: Final = 1.25
CLOSE: Final = 0.1
"""Part of what is too much by which what is enough may be smaller, in the end."""
TRIES: Final = 8


class Tuner:
    """Pure: is told of steps, and says what to try next."""

    def __init__(self, most: int) -> None:
        """`most`: bytes that can be remote at all."""
        self._most = most
        self.local = 0.0
        """Seconds of a step with everything local; 0 before it is known."""
        self._enough, self._too_much = 0, most + 1
        self._tries = 0
        self.settled = False
        """Whether nothing more is tried."""

    def begin(self, step: float, rate: float) -> int:
        """Bytes to try first, from the seconds of a local step and the link's bytes per second."""
        self.local = step
        return min(self._most, int(MARGIN * rate * step))

    def tried(self, remote: int, step: float, exposed: float | None = None) -> int:
        """A step with so many remote bytes took so many seconds: bytes to go on with.

        `exposed`: of them it waited, where that is known; a step that is longer for other reasons hides as much.
        """
        if exposed is not None:
            step = min(step, self.local + exposed)
        if step <= (1 + TOLERANCE) * self.local:
            self._enough = max(self._enough, remote)
        else:
            self._too_much = min(self._too_much, remote)
        return self._next()

    def not_to_be_had(self, remote: int) -> int:
        """So many bytes cannot be borrowed: bytes to go on with."""
        self._too_much = min(self._too_much, remote)
        return self._next()

    def _next(self) -> int:
        self._tries += 1
        enough, too_much = self._enough, self._too_much
        if self._tries >= TRIES or enough >= self._most or too_much - enough <= CLOSE * too_much:
            self.settled = True
            return enough
        if too_much > self._most:
            return min(self._most, int(GROWTH * enough))
        return (enough + too_much) // 2
