"""`SimDriver`: a session with simulated GPUs."""

import ctypes
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import msgspec

from ema_core.ids import GpuId, Place
from ema_driver import shared_memory
from ema_driver.errors import ContextLost, InvalidUse
from ema_driver.protocol import Address, Device, Handle, HealthEvent, Link, MemoryInfo
from ema_driver.sim import linux, wire
from ema_driver.sim.channel import Channel
from ema_driver.sim.config import SimConfig
from ema_driver.sim.faults import Fault
from ema_driver.sim.streams import SimStream
from ema_driver.sim.words import SimWords

T = TypeVar("T")


_ZEROS: Final = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class SimHandle:
    """A hold on simulated memory."""

    place: Place
    size: int
    number: int
    session: "SimDriver"


class SimDriver:
    """One session. `connect` opens one that sees every GPU, `from_fd` the one that `guest` made for a borrower."""

    name = "sim"
    most_copies = 1 << 16

    def __init__(self, link: socket.socket) -> None:
        shared_memory.require()
        self._channel = Channel(link)
        self._closed = False
        try:
            self.config: SimConfig = self._ask(SimConfig, wire.Hello(self._channel.seq(), wire.VERSION))
        except BaseException:
            self._channel.close()
            raise

    @classmethod
    def connect(cls, path: str | os.PathLike[str]) -> Self:
        """A session with the device process behind the socket `path`. Raises OSError where there is none."""
        return cls(linux.connect(os.fspath(path)))

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """A session behind a connected descriptor, which becomes the session's."""
        return cls(socket.socket(fileno=fd))

    def _ask(self, kind: type[T], call: wire.Call, fds: Sequence[int] = ()) -> T:
        result, received = self._channel.ask(call, fds)
        for fd in received:
            os.close(fd)
        return msgspec.convert(result, kind)

    def _do(self, call: wire.Call) -> None:
        self._channel.ask(call)

    def devices(self) -> Sequence[Device]:
        """The GPUs this session can see."""
        return self._ask(list[Device], wire.Devices(self._channel.seq()))

    def links(self) -> Sequence[Link]:
        """Claimed paths."""
        return self._ask(list[Link], wire.Links(self._channel.seq()))

    def memory(self) -> Mapping[Place, MemoryInfo]:
        """Bytes of every visible GPU that answers, and of `HOST`."""
        return self._ask(dict[Place, MemoryInfo], wire.Memory(self._channel.seq()))

    def granularity(self, place: Place) -> int:  # noqa: ARG002  (the same everywhere)
        """Sizes are multiples of this many bytes."""
        return self.config.granularity

    def create(self, place: Place, size: int) -> SimHandle:
        """Take physical memory, zeroed. Raises OutOfMemory, DeviceLost, InvalidUse (size)."""
        (handle,) = self.create_many(place, size, 1)
        return handle

    def create_many(self, place: Place, size: int, count: int) -> list[SimHandle]:
        """Many pieces of memory, all or none."""
        if size < 0:
            raise InvalidUse(f"create: size {size}; must be positive")
        if count < 0:
            raise InvalidUse(f"create: count {count}; must be 0 or more")
        made: list[SimHandle] = []
        try:
            while batch := min(count - len(made), wire.CREATE_LIMIT):
                numbers = self._ask(list[int], wire.Create(self._channel.seq(), place, size, batch))
                made += [SimHandle(place, size, number, self) for number in numbers]
        except BaseException:
            if made:
                self.release(made)
            raise
        return made

    def export(self, handle: Handle) -> int:
        """A new descriptor of the memory, close-on-exec; the caller closes it."""
        _, (fd,) = self._channel.ask(wire.Export(self._channel.seq(), self._number(handle)))
        return fd

    def adopt(self, fd: int, size: int) -> SimHandle:
        """Import memory from a descriptor, which stays the caller's. Raises InvalidUse."""
        if size < 0:
            raise InvalidUse(f"adopt: size {size}; must be positive")
        try:
            number, place = self._ask(tuple[int, str], wire.Adopt(self._channel.seq(), size), [fd])
        except TypeError as error:
            raise InvalidUse(f"adopt: descriptor {fd!r}: {error}") from None
        return SimHandle(Place(place), size, number, self)

    def _number(self, handle: Handle) -> int:
        if not isinstance(handle, SimHandle) or handle.session is not self:
            raise InvalidUse(f"{handle!r} is no handle of this session")
        return handle.number

    def release(self, handles: Sequence[Handle]) -> None:
        """Give handles up, all or none."""
        self._do(wire.Release(self._channel.seq(), tuple(self._number(handle) for handle in handles)))

    def reserve(self, size: int) -> Address:
        """Reserve an address range with nothing mapped in it."""
        (address,) = self.reserve_many(size, 1)
        return address

    def reserve_many(self, size: int, count: int) -> list[Address]:
        """Many ranges, all or none."""
        if size < 0:
            raise InvalidUse(f"reserve: size {size}; must be positive")
        if not 0 <= count <= wire.RESERVE_LIMIT:
            raise InvalidUse(f"reserve: count {count}; must be 0 to {wire.RESERVE_LIMIT}")
        return [Address(a) for a in self._ask(list[int], wire.Reserve(self._channel.seq(), size, count))]

    def unreserve(self, addresses: Sequence[Address]) -> None:
        """Give address ranges up, all or none."""
        self._do(wire.Unreserve(self._channel.seq(), tuple(addresses)))

    def map(self, pairs: Sequence[tuple[Address, Handle]]) -> None:
        """Map each handle's whole memory at the address, all or none."""
        numbered = tuple((address, self._number(handle)) for address, handle in pairs)
        self._do(wire.Map(self._channel.seq(), numbered))

    def unmap(self, addresses: Sequence[Address]) -> None:
        """Unmap what is at each address, all or none; under a copy that has begun it costs the session."""
        self._do(wire.Unmap(self._channel.seq(), tuple(addresses)))

    def words(self, count: int) -> SimWords:
        """A new page of at least `count` words, all zero."""
        if count <= 0:
            raise InvalidUse(f"words: count {count}; must be positive")
        size = -(-(count + wire.HIDDEN_WORDS) * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = shared_memory.sealed_memory("ema-words", size)
        try:
            return self.adopt_words(fd, size // 4 - wire.HIDDEN_WORDS)
        finally:
            os.close(fd)

    def adopt_words(self, fd: int, count: int) -> SimWords:
        """A page that another process made; refused unless it is sealed against resizing and large enough."""
        if count <= 0:
            raise InvalidUse(f"words: count {count}; must be positive")
        number, (doorbell,) = self._channel.ask(wire.RegisterPage(self._channel.seq(), count), [fd])
        return SimWords(self._channel, number, count, os.dup(fd), doorbell)

    def stream(self, device: GpuId) -> SimStream:
        """A new stream on that GPU."""
        return SimStream(self._channel, self._ask(int, wire.OpenStream(self._channel.seq(), device)))

    def view(self, address: int, size: int) -> memoryview:
        """The bytes mapped at an address now, writable, in this process: the CPU plays the kernels. Simulation only.

        The view holds the memory until it is dropped, and keeps showing it when something else is mapped there later.
        """
        if size <= 0 or address < 0:
            raise InvalidUse(f"view: {size} bytes at {address:#x}; size must be positive")
        pieces, fds = self._channel.ask(wire.Open(self._channel.seq(), address, size))
        try:
            lead = pieces[0][0] % mmap.PAGESIZE
            area = mmap.mmap(-1, lead + size)
            at = ctypes.addressof(ctypes.c_char.from_buffer(area))
            for fd, (offset, length) in zip(fds, pieces, strict=True):
                skip = offset % mmap.PAGESIZE
                shared_memory.map_over(at, fd, offset - skip, skip + length)
                at += skip + length
        finally:
            for fd in fds:
                os.close(fd)
        return memoryview(area)[lead:]

    def read(self, address: int, size: int) -> bytes:
        """Bytes from a mapped address, now."""
        if size == 0:
            return b""
        with self.view(address, size) as view:
            return bytes(view)

    def write(self, address: int, data: bytes) -> None:
        """Bytes to a mapped address, now."""
        if data:
            with self.view(address, len(data)) as view:
                view[:] = data

    def zero(self, address: int, size: int) -> None:
        """Zero bytes at a mapped address, now."""
        for start in range(0, size, len(_ZEROS)):
            self.write(address + start, _ZEROS[: size - start])

    def health(self) -> Sequence[HealthEvent]:
        """What devices reported since the last call."""
        return self._ask(list[HealthEvent], wire.Health(self._channel.seq()))

    def guest(self, device: GpuId) -> int:
        """A descriptor that opens a session which sees only `device` (`from_fd`); the caller closes it."""
        _, (fd,) = self._channel.ask(wire.Guest(self._channel.seq(), device))
        return fd

    def inject(self, fault: Fault) -> None:
        """Let a fault happen. Simulation only. Raises InvalidUse for a GPU or path that does not exist."""
        self._do(wire.Inject(self._channel.seq(), fault))

    def clear(self, fault: Fault) -> None:
        """End a fault; harmless if it did not happen. Simulation only."""
        self._do(wire.Clear(self._channel.seq(), fault))

    def shutdown(self) -> None:
        """End the device process, and with it every session. Simulation only."""
        with suppress(ContextLost):
            self._do(wire.Shutdown(self._channel.seq()))
        self.close()

    def close(self) -> None:
        """End the session; what it held is given back when this returns."""
        if not self._closed:
            self._closed = True
            with suppress(ContextLost):
                self._do(wire.Bye(self._channel.seq()))
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
