"""A descriptor that is closed in any case: even where Ctrl-C comes just before it would be."""

import os
from contextlib import suppress


class Descriptor:
    """Owns it. Close it when it is not needed; at the latest it is closed when nobody knows this any more."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Twice is harmless."""
        number, self.number = self.number, -1
        if number >= 0:
            with suppress(OSError):
                os.close(number)

    def __del__(self) -> None:
        self.close()
