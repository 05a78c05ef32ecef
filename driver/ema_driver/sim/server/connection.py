"""One socket of the device process: messages in, answers out. It never blocks, whatever the other end does."""

import os
import socket
from collections.abc import Sequence

from ema_driver.errors import DriverError
from ema_driver.sim import wire
from ema_driver.sim.server.loop import Loop

_MESSAGES_A_TURN = 16


class Connection:
    """Base of a session."""

    def __init__(self, loop: Loop, link: socket.socket) -> None:
        self._loop, self._link = loop, link
        self._open = True
        link.setblocking(False)
        loop.watch(link.fileno(), self._readable)

    def _take(self, body: bytes, fds: Sequence[int]) -> None:
        """Act on a message. The descriptors are closed afterwards."""
        raise NotImplementedError

    def _left(self) -> None:
        """The connection is over: give back what it held."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the connection. Twice is harmless."""
        if self._open:
            self._open = False
            self._loop.forget(self._link.fileno())
            self._left()
            self._link.close()

    def _readable(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                body, fds = wire.receive(self._link)
            except BlockingIOError:
                return
            except OSError:
                self.end()
                return
            try:
                if not body:
                    self.end()
                else:
                    self._take(body, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            if not self._open:
                return

    def fail(self, seq: int, error: DriverError) -> None:
        """Answer a call with an error."""
        self._answer(wire.Failure(seq, type(error).__name__, (str(error),)))

    def reply(self, seq: int, result: object = None, fds: Sequence[int] = ()) -> None:
        """Answer a call; the descriptors are closed."""
        try:
            self._answer(wire.Reply(seq, result), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, answer: wire.Reply | wire.Failure, fds: Sequence[int] = ()) -> None:
        if not self._open:
            return
        try:
            wire.send(self._link, wire.encode(answer), fds)
        except OSError:  # gone, or it asks and never reads
            self.end()
