"""The door: a listening socket. The path is the identity: whoever connects here is who the socket was made for."""

import asyncio
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ema_agent.connection import Connection
from ema_core import wire

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO_WITHIN: Final = 5.0
"""Seconds that a connection may stay silent before its Hello."""
BACKLOG: Final = 1024
UNNAMED: Final = 64
"""Connections that have not said Hello yet, at most; one more, and the oldest of them goes."""
BREATH: Final = 0.1
"""Seconds without accepting, when descriptors have run out."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Door:
    """Listens at one path and waits for each connection's Hello."""

    def __init__(self, path: Path, mode: int, introduce: "Callable[[Guest, wire.Hello], None]") -> None:
        self.path = path
        self._introduce = introduce
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Guest, None] = {}
        """In the order of their coming."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask = os.umask(0o177)
        try:
            self._sock.bind(str(path))
        finally:
            os.umask(mask)
        path.chmod(mode)
        self._sock.listen(BACKLOG)
        self._sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for guest in list(self._waiting):
            guest.connection.close("the agent ends")
        with suppress(FileNotFoundError):
            self.path.unlink()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # No descriptor left. The socket stays readable, so looking again at once would be a busy loop.
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(BREATH, self._listen)
            return
        if len(self._waiting) >= UNNAMED:
            next(iter(self._waiting)).connection.refuse_and_close("connections", f"{UNNAMED} silent", "Hello at once")
        self._waiting[Guest(sock, self._named, self._gone)] = None

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _gone(self, guest: "Guest") -> None:
        self._waiting.pop(guest, None)

    def _named(self, guest: "Guest", hello: wire.Hello) -> None:
        self._gone(guest)
        self._introduce(guest, hello)


class Guest:
    """A connection before and after its Hello: messages go to whoever it was introduced to."""

    def __init__(
        self, sock: socket.socket, named: "Callable[[Guest, wire.Hello], None]", gone: "Callable[[Guest], None]"
    ) -> None:
        self._named, self._gone = named, gone
        self.receive: Callable[[wire.ClientMessage, list[int]], None] = self._first
        self.ended: Callable[[str], None] = lambda _why: None
        self._silence = asyncio.get_running_loop().call_later(HELLO_WITHIN, self._silent)
        self.connection = Connection(sock, self._receive, self._closed)

    def _receive(self, message: wire.ClientMessage, fds: list[int]) -> None:
        self.receive(message, fds)

    def _first(self, message: wire.ClientMessage, _fds: list[int]) -> None:
        if not isinstance(message, wire.Hello):
            self.connection.refuse_and_close("message", type(message).__name__, "Hello first")
            return
        self._silence.cancel()
        self._named(self, message)

    def _silent(self) -> None:
        self.connection.refuse_and_close("message", "none", f"Hello within {HELLO_WITHIN:g} s")

    def _closed(self, why: str) -> None:
        self._silence.cancel()
        self._gone(self)
        self.ended(why)
