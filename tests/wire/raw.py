"""A client without manners: sends any bytes and descriptors, and hears what comes back."""

import os
import socket
import struct
from collections.abc import Sequence
from typing import Self, TypeVar

import msgspec

from ema_core import wire
from ema_core.ids import Place
from ema_driver.protocol import Words
from ema_driver.sim import SimDriver

A = TypeVar("A", bound=wire.Message)


class Gone(Exception):
    """The agent closed the connection."""


class Raw:
    """One connection. `hello` makes it a client."""

    def __init__(self, path: str, timeout: float = 10.0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(path)
        self.sock.settimeout(timeout)
        self.fds: list[int] = []
        self.driver: SimDriver | None = None

    def hello(self, gpu: str, name: str = "raw") -> wire.Welcome:
        """Become a client."""
        self.send(wire.Hello(wire.VERSION, gpu, name))
        answer = self.receive()
        assert isinstance(answer, wire.Welcome), answer
        return answer

    def send(self, message: wire.ClientMessage | bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, or bytes as they are."""
        packet = message if isinstance(message, bytes) else wire.encode(message)
        socket.send_fds(self.sock, [packet], list(fds)) if fds else self.sock.send(packet)

    def receive(self) -> wire.AgentMessage:
        """What the agent says next. Raises Gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self.sock, wire.MAX_MESSAGE, 8)
        except ConnectionError as error:
            raise Gone from error
        self.fds += fds
        if not packet:
            raise Gone
        return wire.decode_agent(packet)

    def answer(self, kind: type[A]) -> A:
        """What the agent says next that is no event."""
        while isinstance(said := self.receive(), wire.Queued | wire.Moved | wire.Lost) or (
            isinstance(said, wire.Dropped) and not said.id
        ):
            pass
        assert isinstance(said, kind), said
        return said

    def ask(self, message: wire.ClientMessage, fds: Sequence[int] = ()) -> wire.AgentMessage:
        """Send a request; its answer."""
        self.send(message, fds)
        while getattr(said := self.receive(), "id", 0) != getattr(message, "id", 0) or isinstance(said, wire.Queued):
            pass
        return said

    def until_gone(self) -> list[wire.AgentMessage]:
        """Everything the agent still says before it closes the connection."""
        said = []
        try:
            while True:
                said.append(self.receive())
        except Gone:
            return said

    def guest(self) -> SimDriver:
        """The session with the own GPU."""
        if self.driver is None:
            self.driver = SimDriver.from_fd(os.dup(self.fds[2]))
        return self.driver

    def page(self, number: int) -> Words:
        """The shared page (0) or the notice page (1)."""
        count = wire.MAX_SLOTS * wire.SLOT_WORDS if number == 0 else wire.NOTICE_WORDS
        return self.guest().adopt_words(self.fds[number], count)

    def window(self, welcome: wire.Welcome, slots: int = 2, number: int = 0, first: int = 0) -> int:
        """Open a window of slots of one granule; bytes of a slot."""
        driver, size = self.guest(), welcome.granularity
        handle = driver.create(Place(welcome.gpu), slots * size)
        fd = driver.export(handle)
        try:
            said = self.ask(wire.OpenWindow(90, number, first, slots, size), [fd])
            assert isinstance(said, wire.Done), said
        finally:
            os.close(fd)
        return size

    def region(self, welcome: wire.Welcome, number: int = 0, chunks: int = 2, *, droppable: bool = False) -> None:
        """Borrow."""
        said = self.ask(wire.GrowRegion(91, number, chunks * welcome.chunk, droppable, 5.0))
        assert isinstance(said, wire.Done), said

    def reset(self) -> None:
        """Go without goodbye, as a killed process does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Close everything. Twice is harmless."""
        self.sock.close()
        if self.driver is not None:
            self.driver.close()
            self.driver = None
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain(message: wire.ClientMessage) -> list[object]:
    """A message as the list that is sent."""
    found = msgspec.msgpack.decode(wire.encode(message))
    assert isinstance(found, list)
    return found
