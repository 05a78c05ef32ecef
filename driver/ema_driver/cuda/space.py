"""A session's addresses: reserved ranges, and what is mapped in them. Checks before the driver is asked.

The driver looks at the addresses of a copy when it is queued, and takes one that it does not know for ordinary host
memory, which it reads: a copy from a range with nothing mapped in it would kill the process, not fail. So every address
is looked up here first, and stays mapped until the copy is queued (`steady`). What is mapped may change afterwards.
"""

import threading
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ema_driver.errors import InvalidUse, NotMapped


class Space:
    """Thread-safe. Changes are made before the driver's, and undone by the caller if the driver refuses."""

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._lock = threading.RLock()
        self._unmapped = 0
        """How often anything was."""
        self._ranges: dict[int, int] = {}
        self._range_starts: list[int] = []
        self._mapped: dict[int, int] = {}
        self._to_come: set[int] = set()
        """Of those, what the driver has yet to map."""
        self._starts: list[int] = []

    def enter(self, address: int, size: int) -> None:
        """A range was reserved."""
        with self._lock:
            self._ranges[address] = size
            insort(self._range_starts, address)

    def leave(self, addresses: Sequence[int]) -> list[tuple[int, int]]:
        """Take ranges out, all or none; start and size of each. Raises InvalidUse (unknown, named twice, in use)."""
        with self._lock:
            if len(set(addresses)) != len(addresses):
                raise InvalidUse("unreserve: an address is named twice")
            for address in addresses:
                size = self._ranges.get(address)
                if size is None:
                    raise InvalidUse(f"unreserve: {address:#x} is not the start of a reserved range")
                if (below := self._below(address + size - 1)) is not None and below >= address:
                    raise InvalidUse(f"unreserve: {address:#x} still has memory mapped at {below:#x}")
            gone = [(address, self._ranges.pop(address)) for address in addresses]
            self._range_starts = sorted(self._ranges)
            return gone

    def map(self, spans: Sequence[tuple[int, int]]) -> None:
        """Enter mappings (address, size) to come, all or none: they count when they are `done`.

        Raises InvalidUse (outside a range, already mapped).
        """
        with self._lock:
            entered: list[int] = []
            try:
                for address, size in spans:
                    self._check(address, size)
                    self._mapped[address] = size
                    self._to_come.add(address)
                    insort(self._starts, address)
                    entered.append(address)
            except InvalidUse:
                self._forget(entered)
                raise

    def done(self, address: int) -> None:
        """The driver has mapped it."""
        with self._lock:
            self._to_come.discard(address)

    def unmap(self, addresses: Sequence[int]) -> list[tuple[int, int]]:
        """Take mappings out, all or none; address and size of each. Raises InvalidUse (unknown, named twice)."""
        with self._lock:
            if len(set(addresses)) != len(addresses):
                raise InvalidUse("unmap: an address is named twice")
            for address in addresses:
                if address not in self._mapped:
                    raise InvalidUse(f"unmap: nothing is mapped exactly at {address:#x}")
            spans = [(address, self._mapped[address]) for address in addresses]
            self._unmapped += 1
            self._forget(addresses)
            return spans

    def pieces(self, address: int, size: int) -> Iterator[tuple[int, int]]:
        """The address range cut where one mapping ends and the next begins. Raises InvalidUse where there is none."""
        if address < 0 or size < 0:
            raise InvalidUse(f"{size} bytes at {address:#x}; neither may be negative")
        end = address + size
        while address < end:
            with self._lock:
                start = self._below(address)
                stop = 0 if start is None or start in self._to_come else start + self._mapped[start]
            if stop <= address:
                raise NotMapped(f"nothing is mapped at {address:#x}")
            yield address, min(stop, end) - address
            address = min(stop, end)

    @contextmanager
    def steady(self) -> Iterator[int]:
        """What is mapped stays so meanwhile. A number that is another one after anything was unmapped."""
        with self._lock:
            yield self._unmapped

    def check(self, spans: Sequence[tuple[int, int]]) -> None:
        """Raise NotMapped unless something is mapped at all of these (address, size)."""
        for address, size in spans:
            for _ in self.pieces(address, size):
                pass

    def everything(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """All mappings and all ranges, for the end of a session; afterwards there are none."""
        with self._lock:
            mapped, ranges = list(self._mapped.items()), list(self._ranges.items())
            self._forget(list(self._mapped))
            self._ranges.clear()
            self._range_starts.clear()
            return mapped, ranges

    def _check(self, address: int, size: int) -> None:
        at = bisect_right(self._range_starts, address) - 1
        start = self._range_starts[at] if at >= 0 else 0
        if at < 0 or address + size > start + self._ranges[start]:
            raise InvalidUse(f"map: {address:#x} + {size} bytes is not inside a reserved range")
        if (address - start) % self._granularity:
            raise InvalidUse(f"map: {address:#x} is no multiple of {self._granularity}")
        below = self._below(address + size - 1)
        if below is not None and below + self._mapped[below] > address:
            raise InvalidUse(f"map: memory is already mapped at {below:#x}")

    def _below(self, address: int) -> int | None:
        at = bisect_right(self._starts, address) - 1
        return self._starts[at] if at >= 0 else None

    def _forget(self, addresses: Sequence[int]) -> None:
        self._to_come.difference_update(addresses)
        for address in addresses:
            del self._mapped[address]
        if len(addresses) > 8:
            self._starts = sorted(self._mapped)
        else:
            for address in addresses:
                del self._starts[bisect_right(self._starts, address) - 1]
