"""Physical memory: who holds which allocation, and when its bytes are really free.

An allocation is a sealed memory file. A descriptor that leaves this process belongs to an open file description of its
own with a shared `flock`; duplicates and mappings of it, in any process, keep that description open. So an exclusive
lock on our own description succeeds only when nobody outside holds the memory any more, however its holder ended.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Collection, Mapping
from queue import SimpleQueue

from ema_core.ids import Place
from ema_driver import shared_memory
from ema_driver.errors import DriverError, InvalidUse, OutOfMemory
from ema_driver.sim.server.loop import Loop


class Allocation:
    """One piece of physical memory."""

    __slots__ = ("base", "exported", "fd", "handles", "inode", "lost", "mappings", "pins", "place", "size")

    def __init__(self, place: Place, size: int) -> None:
        self.place, self.size = place, size
        self.fd = shared_memory.sealed_memory("ema-sim", size)
        try:
            self.base = shared_memory.map_shared(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self.handles = 0
        self.mappings = 0
        self.pins = 0
        """Pieces of copies that a worker moves just now."""
        self.exported = False
        self.lost = False
        """Its GPU was lost since: the bytes are gone, also when the GPU is back."""

    def export(self) -> int:
        """A descriptor for outside. Raises InvalidUse."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise InvalidUse(
                "the memory's file is locked by somebody else; a holder must not use flock on it"
            ) from None
        self.exported = True
        return fd

    def held_outside(self) -> bool:
        """Whether a descriptor or mapping of it is open in any other process."""
        if not self.exported:
            return False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        self.exported = False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False


class Accounts:
    """Capacity and use of every place."""

    def __init__(self, capacity: Mapping[Place, int], loop: Loop) -> None:
        self._loop = loop
        self.capacity = dict(capacity)
        """Bytes that can be created at each place: all but what the driver reserves."""
        self.used = dict.fromkeys(capacity, 0)
        self.refused: dict[Place, int] = {}
        """Creations still to be refused; -1: all."""
        self.unmappable: dict[Place, tuple[int, int]] = {}
        """Mappings that still succeed, and those to be refused after them; -1: all."""
        self.stuck: set[Place] = set()
        """Places where nothing that is given up becomes free."""
        self._by_inode: dict[int, Allocation] = {}
        self._loose: set[Allocation] = set()
        """Nobody here has a handle or mapping: free as soon as nobody outside holds it."""
        self._freed: list[Allocation] = []
        self._dead: SimpleQueue[list[Allocation]] = SimpleQueue()
        threading.Thread(target=self._bury, name="frees", daemon=True).start()

    def create(self, place: Place, size: int, count: int) -> list[Allocation]:
        """Take memory in `count` pieces, all or none. Raises OutOfMemory."""
        left = self.refused.get(place, 0)
        if left:
            if left > 0:
                self.refused[place] = left - 1
            raise OutOfMemory(place, size, 0)
        if self.free(place) < size * count:
            self.collect()
        if (free := self.free(place)) < size * count:
            raise OutOfMemory(place, size * count, free)
        made: list[Allocation] = []
        try:
            made.extend(self._make(place, size) for _ in range(count))
        except OSError as error:
            for allocation in made:
                self.settle(allocation)
            if error.errno not in {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC}:
                raise
            raise OutOfMemory(place, size * count, self.free(place)) from error
        return made

    def _make(self, place: Place, size: int) -> Allocation:
        allocation = Allocation(place, size)
        self.used[place] += size
        self._by_inode[allocation.inode] = allocation
        return allocation

    def check_mapping(self, places: Collection[Place]) -> None:
        """A call that maps memory at these places. Raises DriverError where that is refused."""
        for place in self.unmappable.keys() & places:
            after, left = self.unmappable[place]
            if after:
                self.unmappable[place] = after - 1, left
            elif left:
                self.unmappable[place] = 0, left - 1 if left > 0 else left
                raise DriverError(f"memory at {place} cannot be mapped")

    def free(self, place: Place) -> int:
        """Bytes free, as far as known without asking (`collect`)."""
        return self.capacity[place] - self.used[place]

    def find(self, fd: int, size: int) -> Allocation:
        """The allocation behind a descriptor. Raises InvalidUse."""
        # Asked first: `fstat` of some foreign file systems can block, this cannot.
        if not shared_memory.is_sealed(fd):
            raise InvalidUse("adopt: the descriptor is no memory file sealed against resizing")
        stat = os.fstat(fd)
        allocation = self._by_inode.get(stat.st_ino)
        if allocation is None or not os.path.sameopenfile(fd, allocation.fd):
            raise InvalidUse("adopt: the descriptor is no memory of these devices")
        if allocation.size != size:
            raise InvalidUse(f"adopt: size {size} asked, the memory has {allocation.size} bytes")
        return allocation

    def settle(self, allocation: Allocation) -> None:
        """Call after a handle, mapping or pin has gone: frees the bytes if that was the last hold."""
        if allocation.handles or allocation.mappings or allocation.pins:
            return
        if allocation.held_outside() or allocation.place in self.stuck:
            self._loose.add(allocation)
            return
        self._loose.discard(allocation)
        del self._by_inode[allocation.inode]
        if not allocation.lost:
            self.used[allocation.place] -= allocation.size
        if not self._freed:
            self._loop.ready.append(self._hand_over)  # after the reply: the thread would get in its way
        self._freed.append(allocation)

    def collect(self) -> None:
        """Look again at what only others may still hold."""
        for allocation in tuple(self._loose):
            self.settle(allocation)

    def lose(self, place: Place) -> None:
        """Everything at a place is gone."""
        for allocation in self._by_inode.values():
            if allocation.place == place and not allocation.lost:
                allocation.lost = True
                self.used[place] -= allocation.size

    def _hand_over(self) -> None:
        self._dead.put(self._freed)
        self._freed = []

    def _bury(self) -> None:
        # Giving a gigabyte back takes the kernel tens of milliseconds, and the loop must not wait for it.
        while True:
            for allocation in self._dead.get():
                shared_memory.unmap(allocation.base, allocation.size)
                os.close(allocation.fd)
