"""Streams and graphs on the caller's side: numbers of what the device process runs."""

from collections.abc import Sequence
from contextlib import suppress

from ema_driver.errors import ContextLost, InvalidUse
from ema_driver.protocol import Op, Wait, Write
from ema_driver.sim import wire
from ema_driver.sim.channel import Channel
from ema_driver.sim.words import SimWords

_FOREVER = 1e9
"""Seconds."""


class SimGraph:
    """Made by `SimStream.instantiate`."""

    def __init__(self, channel: Channel, stream: "SimStream", number: int) -> None:
        self._channel, self._stream, self._number = channel, stream, number
        self._launch = wire.encode(wire.Launch(number))
        self._open = True

    def launch(self) -> None:
        """Append the operations to the stream: one small message."""
        if not (self._open and self._stream.open):
            raise InvalidUse("the graph or its stream is closed")
        self._channel.tell(self._launch)

    def close(self) -> None:
        """Give the graph up; launches of it that are queued still run."""
        if self._open:
            self._open = False
            with suppress(ContextLost):  # the graph went with the session
                self._channel.tell(wire.encode(wire.CloseGraph(self._number)))


class SimStream:
    """Made by `SimDriver.stream`."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self.open = True

    def enqueue(self, ops: Sequence[Op]) -> None:
        """Append operations: one message, without an answer."""
        if not self.open:
            raise InvalidUse("the stream is closed")
        self._channel.tell(wire.encode(wire.Enqueue(self._number, self._translate(ops))))

    def instantiate(self, ops: Sequence[Op]) -> SimGraph:
        """Make operations ready to be launched on this stream."""
        call = wire.Instantiate(self._channel.seq(), self._number, self._translate(ops))
        number, _ = self._channel.ask(call)
        return SimGraph(self._channel, self, number)

    def synchronize(self, timeout: float) -> bool:
        """Block until all that was queued before has run; False after `timeout` seconds."""
        done, _ = self._channel.ask(
            wire.Synchronize(self._channel.seq(), self._number, min(max(0.0, timeout), _FOREVER))
        )
        return bool(done)

    def done(self) -> bool:
        """Whether everything queued so far has run."""
        return self.synchronize(0)

    def close(self) -> bool:
        """Drop what is queued; True, as no byte moves any more."""
        if self.open:
            self.open = False
            with suppress(ContextLost):  # the stream went with the session
                self._channel.ask(wire.CloseStream(self._channel.seq(), self._number))
        return True

    def _translate(self, ops: Sequence[Op]) -> tuple[wire.WireOp, ...]:
        return tuple(self._translated(op) for op in ops)

    def _translated(self, op: Op) -> wire.WireOp:
        if isinstance(op, Wait | Write):
            if not isinstance(op.page, SimWords) or op.page.channel is not self._channel:
                raise InvalidUse("a page of another session: adopt it in this one first")
            op.page.check(op.index, op.value)
            kind = wire.WaitOp if isinstance(op, Wait) else wire.WriteOp
            return kind(op.page.number, op.index, op.value)
        if min(op.target, op.source, op.size) < 0:
            raise InvalidUse(f"{op}: addresses and size must not be negative")
        return wire.CopyOp(op.target, op.source, op.size)
