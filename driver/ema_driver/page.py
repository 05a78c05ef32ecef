"""What pages of words have in common, whoever maps them."""

from ema_driver.errors import InvalidUse


class Page:
    """A page of 32-bit words behind a descriptor."""

    def __init__(self, fd: int, count: int) -> None:
        """`fd` becomes this object's."""
        self._fd, self._count = fd, count
        self._open = True

    @property
    def count(self) -> int:
        """How many words."""
        return self._count

    def check(self, index: int, value: int) -> None:
        """Raise InvalidUse unless there is such a word and the value fits it."""
        if not self._open:
            raise InvalidUse("the page is closed")
        if not 0 <= index < self._count:
            raise InvalidUse(f"word {index}; the page has {self._count}")
        if not 0 <= value < 2**32:
            raise InvalidUse(f"value {value}; must fit 32 bits")

    def fileno(self) -> int:
        """The page's descriptor. It stays this object's."""
        return self._fd
