"""Memory that one session holds, by number."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from ema_driver.errors import InvalidUse
from ema_driver.sim.server.accounts import Accounts, Allocation

OBJECT_LIMIT: Final = 100_000
"""Handles, streams and graphs of one session, each."""


def check_room(kept: Mapping[int, object], count: int = 1) -> None:
    """Raise InvalidUse if a session may not have so many more objects of one kind."""
    if len(kept) + count > OBJECT_LIMIT:
        raise InvalidUse(f"more than {OBJECT_LIMIT} objects of one kind in one session")


class Handles:
    """An allocation lives as long as anybody's handle or mapping of it."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._numbers = itertools.count(1)
        self.held: dict[int, Allocation] = {}

    def keep(self, allocation: Allocation) -> int:
        """The number of a new handle. Raises InvalidUse."""
        check_room(self.held)
        number = next(self._numbers)
        self.held[number] = allocation
        allocation.handles += 1
        return number

    def find(self, call: str, number: int) -> Allocation:
        """What a call means. Raises InvalidUse."""
        allocation = self.held.get(number)
        if allocation is None:
            raise InvalidUse(f"{call}: handle {number} is unknown or released")
        return allocation

    def release(self, numbers: Sequence[int]) -> None:
        """All or none. Raises InvalidUse."""
        if len(set(numbers)) != len(numbers):
            raise InvalidUse("release: a handle is named twice")
        for number in numbers:
            self.find("release", number)
        for number in numbers:
            self._drop(self.held.pop(number))

    def clear(self) -> None:
        """The session has ended."""
        for allocation in self.held.values():
            self._drop(allocation)
        self.held.clear()

    def _drop(self, allocation: Allocation) -> None:
        allocation.handles -= 1
        self._accounts.settle(allocation)
