"""The bytes of a request: known from its number and the place within it alone, so that every copy can be checked.

Random bytes, of which each owner has a stretch that begins elsewhere: bytes of another owner, or of another place of
the same owner, do not pass for the right ones.
"""

from random import Random
from typing import Final

STARTS: Final = 1 << 20
STRIDE: Final = 4099
"""Odd, so that `STARTS` owners begin at as many different places."""
Buffer = bytes | memoryview


class Pattern:
    """Bytes of owners 0 to `STARTS` - 1, each up to `largest` bytes."""

    def __init__(self, seed: int, largest: int) -> None:
        self._bytes = Random(seed).randbytes(STARTS + largest)  # noqa: S311 - known bytes, no secret

    def bytes_of(self, owner: int, at: int, size: int) -> bytes:
        """The owner's bytes from its place `at` on."""
        start = owner * STRIDE % STARTS + at
        return self._bytes[start : start + size]

    def wrong(self, there: Buffer, owner: int, at: int) -> int:
        """How many bytes of `there` are not the owner's bytes from `at` on."""
        found, right = bytes(there), self.bytes_of(owner, at, len(there))
        if found == right:
            return 0
        return sum(a != b for a, b in zip(found, right, strict=True))
