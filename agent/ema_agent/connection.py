"""One client's socket: packets in, packets out, descriptors beside them, never blocking the agent.

SOCK_SEQPACKET keeps packets whole. A packet that is too long, carries too many descriptors or does not decode gets a
typed refusal and costs only its own connection. What a client that does not read (stopped, hung) would be told waits in
a short queue; events beyond it are left out, since the words in its notice page already say what matters.
"""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from ema_core import wire
from ema_core.wire import Kinds, Refused

SHOWN: Final = 200
"""Characters of a bad value that are sent back."""
OUTBOX: Final = 256
"""Packets that wait for a client that does not read."""
PACKETS_PER_TURN: Final = 16
"""Packets that one client may have read before others get their turn."""
_FD: Final = struct.Struct("i")


class Connection:
    """A non-blocking packet socket on the agent's loop."""

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[wire.ClientMessage, list[int]], None],
        ended: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = received
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: wire.AgentMessage, fds: Sequence[int] = ()) -> None:
        """Send an answer; `fds` are duplicated and stay the caller's."""
        if self.closed:
            return
        if len(self._outbox) >= OUTBOX:
            self.close("it does not read its answers")
            return
        self._outbox.append((wire.encode(message), [os.dup(f) for f in fds]))
        self._flush()

    def tell(self, message: wire.AgentMessage) -> None:
        """Send an event that may be left out if the client does not read."""
        if len(self._outbox) < OUTBOX // 2:
            self.send(message)

    def close(self, why: str) -> None:
        """End the connection. Twice is harmless."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()
        self._ended(why)

    def _flush(self) -> None:
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                if fds:
                    socket.send_fds(self._sock, [packet], fds)
                else:
                    self._sock.send(packet)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                self.close(f"sending failed: {error.strerror}")
                return
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            if self.closed:
                return
            try:
                packet, ancillary, flags, _ = self._sock.recvmsg(
                    wire.MAX_MESSAGE, socket.CMSG_SPACE(wire.MAX_DESCRIPTORS * _FD.size), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                self.close(f"receiving failed: {error.strerror}")
                return
            fds = [
                fd
                for level, kind, data in ancillary
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
                for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])
            ]
            try:
                self._packet(packet, fds, flags)
            finally:
                # Whoever wants a descriptor has duplicated or used it by now.
                for fd in fds:
                    with suppress(OSError):
                        os.close(fd)

    def _packet(self, packet: bytes, fds: list[int], flags: int) -> None:
        if not packet:
            self.close("the client closed it")
            return
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            limit = f"at most {wire.MAX_MESSAGE} bytes and {wire.MAX_DESCRIPTORS} descriptors"
            self.refuse_and_close("packet", "a longer one", limit)
            return
        try:
            message = wire.decode_client(packet)
        except msgspec.MsgspecError as error:
            self.refuse_and_close("packet", repr(packet[:24]), f"a message of version {wire.VERSION}: {error}")
            return
        self._received(message, fds)

    def refuse_and_close(self, field: str, value: str, expected: str) -> None:
        """Say what was wrong, then end this connection only."""
        value = value[:SHOWN]
        text = f"{field} is {value}; expected {expected}"
        self.send(Refused(0, Kinds.BAD, text, field, value, expected))
        self.close(text)
