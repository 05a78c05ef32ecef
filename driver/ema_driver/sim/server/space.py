"""One session's addresses: reserved ranges, and what is mapped in them."""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

from ema_driver.errors import InvalidUse
from ema_driver.sim.server.accounts import Accounts, Allocation

_FIRST = 0x2000_0000_0000
_LAST = 0x7FFF_0000_0000_0000


class Mapped:
    """An allocation at an address."""

    __slots__ = ("address", "allocation", "copies", "end")

    def __init__(self, address: int, allocation: Allocation) -> None:
        self.address, self.allocation = address, allocation
        self.end = address + allocation.size
        self.copies = 0
        """Copies that have begun and touch it."""


class AddressSpace:
    """Numbers only: nothing here is an address of the device process itself."""

    def __init__(self, accounts: Accounts, granularity: int) -> None:
        self._accounts, self._granularity = accounts, granularity
        self._next = _FIRST
        self._ranges: dict[int, int] = {}
        self._range_starts: list[int] = []
        self._mapped: dict[int, Mapped] = {}
        self._starts: list[int] = []

    def reserve(self, size: int, count: int) -> list[int]:
        """Fresh ranges. Raises InvalidUse."""
        if size <= 0 or size % self._granularity:
            raise InvalidUse(f"reserve: size {size}; must be a positive multiple of {self._granularity}")
        # An unused gap behind every range: a copy that runs over the end is a fault, not a neighbour's bytes.
        first, step = self._next, size + self._granularity
        if first + step * count > _LAST:
            raise InvalidUse(f"reserve: {count} × size {size}; the address space has {_LAST - first} bytes left")
        self._next = first + step * count
        addresses = [first + step * i for i in range(count)]
        self._ranges.update((a, a + size) for a in addresses)
        self._range_starts += addresses
        return addresses

    def unreserve(self, addresses: Sequence[int]) -> None:
        """Give ranges up. Raises InvalidUse and changes nothing if one is unknown, named twice or in use."""
        if len(set(addresses)) != len(addresses):
            raise InvalidUse("unreserve: an address is named twice")
        for address in addresses:
            end = self._ranges.get(address)
            if end is None:
                raise InvalidUse(f"unreserve: {address:#x} is not the start of a reserved range")
            at = bisect_right(self._starts, end - 1) - 1
            if at >= 0 and self._starts[at] >= address:
                raise InvalidUse(f"unreserve: {address:#x} still has memory mapped at {self._starts[at]:#x}")
        gone = set(addresses)
        for address in addresses:
            del self._ranges[address]
        self._range_starts = [start for start in self._range_starts if start not in gone]

    def map(self, pairs: Sequence[tuple[int, int]], handles: Mapping[int, Allocation]) -> None:
        """Map handles at addresses: all, or none and InvalidUse."""
        done: list[int] = []
        try:
            for address, handle in pairs:
                self._map(address, handles.get(handle))
                done.append(address)
        except InvalidUse:
            self._drop(done)
            raise

    def _map(self, address: int, allocation: Allocation | None) -> None:
        if allocation is None:
            raise InvalidUse("map: a handle is unknown or released")
        at = bisect_right(self._range_starts, address) - 1
        end = address + allocation.size
        if at < 0 or end > self._ranges[self._range_starts[at]]:
            raise InvalidUse(f"map: {address:#x} + {allocation.size} bytes is not inside a reserved range")
        if address % self._granularity:
            raise InvalidUse(f"map: {address:#x} is no multiple of {self._granularity}")
        below = bisect_right(self._starts, end - 1) - 1
        if below >= 0 and self._mapped[self._starts[below]].end > address:
            raise InvalidUse(f"map: memory is already mapped at {self._starts[below]:#x}")
        self._mapped[address] = Mapped(address, allocation)
        insort(self._starts, address)
        allocation.mappings += 1

    def unmap(self, addresses: Sequence[int]) -> bool:
        """Unmap all, or none and InvalidUse. True if no copy was under way in any of them."""
        if len(set(addresses)) != len(addresses):
            raise InvalidUse("unmap: an address is named twice")
        for address in addresses:
            if address not in self._mapped:
                raise InvalidUse(f"unmap: nothing is mapped exactly at {address:#x}")
        quiet = not any(self._mapped[address].copies for address in addresses)
        self._drop(addresses)
        return quiet

    def _drop(self, addresses: Sequence[int]) -> None:
        if len(addresses) > 8:
            gone = set(addresses)
            self._starts = [start for start in self._starts if start not in gone]
        else:
            for address in addresses:
                del self._starts[bisect_right(self._starts, address) - 1]
        for address in addresses:
            allocation = self._mapped.pop(address).allocation
            allocation.mappings -= 1
            self._accounts.settle(allocation)

    def find(self, address: int) -> Mapped | None:
        """What is mapped at an address, at its start or inside."""
        found = self._mapped.get(address)
        if found is not None:
            return found
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        found = self._mapped[self._starts[at]]
        return found if address < found.end else None

    def parts(self, address: int, size: int) -> list[tuple[Mapped, int, int]]:
        """(mapping, offset in it, bytes) over a range. Raises InvalidUse if there is a hole."""
        parts: list[tuple[Mapped, int, int]] = []
        end = address + size
        while address < end:
            part = self.find(address)
            if part is None:
                raise InvalidUse(f"nothing is mapped at {address:#x}")
            parts.append((part, address - part.address, min(end, part.end) - address))
            address = part.end
        return parts

    def clear(self) -> None:
        """Unmap everything."""
        self._drop(tuple(self._starts))
