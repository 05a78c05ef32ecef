"""One session's socket, shared by threads: calls that wait for their answer, and messages that get none."""

import itertools
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ema_core.ids import Place
from ema_driver import errors
from ema_driver.sim import wire

_KINDS = {
    kind.__name__: kind for kind in (errors.DriverError, errors.InvalidUse, errors.DeviceLost, errors.ContextLost)
}
_GONE = "the device process has gone, and all simulated memory with it"


class Channel:
    """Whoever waits for an answer reads for all: there is no reader thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._seqs = itertools.count(1)
        self._answers: dict[int, tuple[wire.Reply | wire.Failure, list[int]]] = {}
        self._waiting: set[int] = set()
        self._turn = threading.Condition()
        self._reading = False
        self._ended = ""

    def tell(self, body: bytes) -> None:
        """Send a message that gets no answer. Raises ContextLost where there is nobody to send it to."""
        try:
            wire.send(self._link, body)
        except OSError:
            raise errors.ContextLost(self._ended or _GONE) from None

    def seq(self) -> int:
        """The number of the next call."""
        return next(self._seqs)

    def ask(self, call: wire.Call, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        """Send a call; its result and descriptors, which are the caller's. Raises what the call raises."""
        with self._turn:
            self._waiting.add(call.seq)
        try:
            with suppress(OSError):  # the other end has gone: what it said last is read below
                wire.send(self._link, wire.encode(call), fds)
            answer, received = self._await(call.seq)
        finally:
            with self._turn:
                self._waiting.discard(call.seq)
        if isinstance(answer, wire.Reply):
            return answer.result, received
        if answer.kind == "OutOfMemory":
            place, asked, free = answer.arguments
            raise errors.OutOfMemory(Place(place), asked, free)
        raise _KINDS[answer.kind](*answer.arguments)

    def _await(self, seq: int) -> tuple[wire.Reply | wire.Failure, list[int]]:
        while True:
            with self._turn:
                while seq not in self._answers and self._reading and not self._ended:
                    self._turn.wait()
                if seq in self._answers:
                    return self._answers.pop(seq)
                if self._ended:
                    raise errors.ContextLost(self._ended)
                self._reading = True
            try:
                self._read()
            finally:
                with self._turn:
                    self._reading = False
                    self._turn.notify_all()

    def _read(self) -> None:
        try:
            body, fds = self._receive()
        except OSError:
            body, fds = b"", []
        if not body:
            self._ended = self._ended or _GONE
            return
        answer = wire.decode_answer(body)
        if answer.seq in self._waiting:
            self._answers[answer.seq] = answer, fds
            return
        for fd in fds:
            os.close(fd)
        if answer.seq == 0 and isinstance(answer, wire.Failure):
            self._ended = f"the device process ended the session: {answer.arguments[0]}"

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            return wire.receive(self._link)
        except ConnectionResetError:  # it went without reading all we sent; what it said before is still to be read
            return wire.receive(self._link)

    def close(self) -> None:
        """End the session; calls that wait raise ContextLost. Twice is harmless."""
        with self._turn:
            self._ended = self._ended or "the session is closed"
        with suppress(OSError):  # the other end went first
            self._link.shutdown(socket.SHUT_RDWR)
        with self._turn:
            self._turn.wait_for(lambda: not self._reading)
        self._link.close()
