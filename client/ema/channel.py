"""The line to the agent: requests with answers, one-way messages, and a thread that hears answers and events.

Connecting again after the agent was gone is the pool's business; a channel ends once and for all.
"""

import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ema import errors
from ema_core import wire
from ema_core.wire import Kinds

_FD: Final = struct.Struct("i")


def failure(refused: wire.Refused) -> errors.EmaError:
    """The exception for a refusal."""
    if refused.kind == Kinds.FULL:
        return errors.PoolFull(refused.message, refused.position)
    if refused.kind == Kinds.BAD:
        return errors.BadInput(refused.field, refused.value, refused.expected)
    known: dict[str, type[errors.EmaError]] = {
        Kinds.LIMIT: errors.LimitReached,
        Kinds.MEMORY: errors.OutOfMemory,
        Kinds.BUSY: errors.InUse,
        Kinds.IN_USE: errors.InUse,
    }
    return known.get(refused.kind, errors.EmaError)(refused.message)


class Answer:
    """What the agent will answer. A future of the standard library would cost a tenth of the import time."""

    __slots__ = ("_came", "_error", "_message")

    def __init__(self) -> None:
        self._came = threading.Event()
        self._message: wire.AgentMessage | None = None
        self._error: errors.EmaError | None = None

    def came(self, message: wire.AgentMessage) -> None:
        """It is this."""
        self._message = message
        self._came.set()

    def failed(self, error: errors.EmaError) -> None:
        """It is a refusal, or never comes."""
        self._error = error
        self._came.set()

    def wait(self) -> wire.AgentMessage:
        """The answer, when it is there. Raises what the agent refused with, or AgentLost."""
        self._came.wait()
        if self._error is not None:
            raise self._error
        assert self._message is not None  # noqa: S101 - one of the two was set before the event
        return self._message


class Channel:
    """One connection. Thread-safe."""

    def __init__(
        self, path: str, hello: wire.Hello, event: Callable[[wire.AgentMessage], None], ended: Callable[[str], None]
    ) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._event = event
        self._ended = ended
        self._ids = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._lock = threading.Lock()
        self.lost: str | None = None
        try:
            self._sock.settimeout(10.0)
            self._sock.connect(path)
            self._sock.send(wire.encode(hello))
            answer, self.fds = self._receive()
        except OSError as error:
            self._sock.close()
            why = f"no agent answers at {path} ({error.strerror or error})"
            raise errors.AgentLost(f"{why}; start one with `ema up`, or name its socket in EMA_SOCKET") from error
        except errors.AgentLost:
            self._sock.close()
            raise
        if not isinstance(answer, wire.Welcome):
            self._close_fds()
            self._sock.close()
            raise failure(answer) if isinstance(answer, wire.Refused) else errors.AgentLost(f"{path} is no agent")
        self.welcome = answer
        self._sock.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="ema-reader", daemon=True)

    def listen(self) -> None:
        """Begin to hear answers and events."""
        self._reader.start()

    def send(self, message: wire.ClientMessage, fds: Sequence[int] = ()) -> None:
        """Send a one-way message. Raises AgentLost."""
        try:
            if fds:
                socket.send_fds(self._sock, [wire.encode(message)], list(fds))
            else:
                self._sock.send(wire.encode(message))
        except OSError as error:
            raise errors.AgentLost(self.lost or f"the agent is gone: {error.strerror or error}") from error

    def submit(self, make: Callable[[int], wire.ClientMessage], fds: Sequence[int] = ()) -> Answer:
        """Send a request; its answer is waited for later."""
        answer = Answer()
        with self._lock:
            if self.lost is not None:
                raise errors.AgentLost(self.lost)
            number = next(self._ids)
            self._answers[number] = answer
        try:
            self.send(make(number), fds)
        except errors.AgentLost:
            with self._lock:
                self._answers.pop(number, None)
            raise
        return answer

    def ask(self, make: Callable[[int], wire.ClientMessage], fds: Sequence[int] = ()) -> wire.AgentMessage:
        """Send a request and wait for its answer. Raises what the agent refused with, or AgentLost."""
        return self.submit(make, fds).wait()

    def close(self) -> None:
        """Say goodbye. Twice is harmless."""
        try:
            self._sock.send(wire.encode(wire.Goodbye()))
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The agent was quicker.
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(5.0)
        self._sock.close()
        self._close_fds()

    def _close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def _receive(self) -> tuple[wire.AgentMessage, list[int]]:
        packet, ancillary, _flags, _ = self._sock.recvmsg(
            wire.MAX_MESSAGE, socket.CMSG_SPACE(wire.MAX_DESCRIPTORS * _FD.size), socket.MSG_CMSG_CLOEXEC
        )
        fds = [
            fd
            for level, kind, data in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
            for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])
        ]
        if not packet:
            raise errors.AgentLost("the agent closed the connection")
        try:
            return wire.decode_agent(packet), fds
        except msgspec.MsgspecError as error:
            raise errors.AgentLost(f"the agent speaks another version: {error}") from error

    def _read(self) -> None:
        why = ""
        while not why:
            try:
                message, fds = self._receive()
            except OSError as error:
                why = f"the agent is gone: {error.strerror or error}"
            except errors.AgentLost as error:
                why = str(error)
            else:
                for fd in fds:
                    os.close(fd)
                self._heard(message)
        with self._lock:
            self.lost = why
            waiting, self._answers = self._answers, {}
        self._sock.close()
        for answer in waiting.values():
            answer.failed(errors.AgentLost(why))
        self._ended(why)

    def _heard(self, message: wire.AgentMessage) -> None:
        number = getattr(message, "id", 0)
        if not number or isinstance(message, wire.Queued):
            self._event(message)
            return
        if isinstance(message, wire.Dropped) and message.more:
            self._event(message)
            return
        with self._lock:
            answer = self._answers.pop(number, None)
        if answer is None:
            return
        if isinstance(message, wire.Refused):
            answer.failed(failure(message))
        else:
            answer.came(message)
