"""Sessions: one socket, one address space, and what it holds. Guests are trusted with nothing."""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ema_core.ids import HOST, GpuId, Place
from ema_driver.errors import DriverError, InvalidUse, OutOfMemory
from ema_driver.protocol import HealthEvent
from ema_driver.sim import wire
from ema_driver.sim.server.connection import Connection
from ema_driver.sim.server.execution import Execution
from ema_driver.sim.server.handles import Handles, check_room
from ema_driver.sim.server.loop import now
from ema_driver.sim.server.machine import Machine
from ema_driver.sim.server.streams import lost

_KEPT_EVENTS = 1000
PAGE_COUNT = 1000
"""Pages of a guest's session: each costs the device process descriptors."""


class Session(Connection):
    """One connection. `guest` is the only GPU it sees, or None for a session that sees all."""

    def __init__(
        self, machine: Machine, link: socket.socket, guest: GpuId | None, ended: Callable[["Session"], None]
    ) -> None:
        self._machine, self._guest, self._ended = machine, guest, ended
        self._accounts = machine.accounts
        self._run = Execution(machine)
        self._handles = Handles(machine.accounts)
        self._events: deque[HealthEvent] = deque(maxlen=_KEPT_EVENTS)
        self._numbers = 0
        machine.tenants.add(self)
        super().__init__(machine.loop, link)

    # What devices tell

    def report(self, event: HealthEvent) -> None:
        """Keep an event until it is asked for."""
        if self._guest in {None, event.gpu}:
            self._events.append(event)

    def device_lost(self, gpu: GpuId) -> None:
        """End the streams that run on the device or move its bytes just now."""
        self._run.device_lost(gpu)

    # Messages

    def _take(self, body: bytes, fds: Sequence[int]) -> None:
        try:
            message = wire.decode_message(body)
        except msgspec.MsgspecError as error:
            self._answer(wire.Failure(0, "InvalidUse", (f"malformed message: {error}",)))
            self.end()
            return
        try:
            if isinstance(message, wire.Launch):
                stream, program = self._run.graphs[message.graph]
                stream.append(program)
            elif isinstance(message, wire.Enqueue):
                self._run.streams[message.stream].append(self._run.compile(message.ops))
            elif isinstance(message, wire.CloseGraph):
                self._run.graphs.pop(message.graph, None)
            elif isinstance(message, wire.ClosePage):
                self._machine.pages.drop(self._run.pages.pop(message.page))
            else:
                self._call(message, fds)
        except (KeyError, InvalidUse, OverflowError) as error:
            # Only a broken client gets here: ours checks before it sends what has no reply.
            self._answer(wire.Failure(0, "InvalidUse", (f"{type(message).__name__}: {error!r}",)))
            self.end()

    def _call(self, call: wire.Call, fds: Sequence[int]) -> None:
        try:
            if self._run.lost is not None and not isinstance(call, wire.Bye):
                raise self._run.lost
            _CALLS[type(call)](self, call, fds)
        except OutOfMemory as error:
            self._answer(wire.Failure(call.seq, "OutOfMemory", (error.place, error.asked, error.free)))
        except DriverError as error:
            self.fail(call.seq, error)
        except OSError as error:  # descriptors or memory of the machine underneath are short
            self.fail(call.seq, DriverError(f"{type(call).__name__}: {error}"))

    # Endings

    def _left(self) -> None:
        self._give_up()
        self._machine.tenants.discard(self)
        self._ended(self)

    def _give_up(self) -> None:
        self._run.give_up()
        self._handles.clear()

    def bye(self, _call: wire.Bye, _: Sequence[int]) -> None:
        """The caller sees its connection end when no byte of it moves any more."""
        moving = [stream for stream in self._run.streams.values() if stream.job is not None]
        self._give_up()
        left = len(moving)

        def still() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self.end()

        if not moving:
            self.end()
        for stream in moving:
            stream.when_still(still)

    # Calls

    def _visible(self) -> set[Place]:
        seen = {device.id for device in self._machine.devices()}
        return {HOST, *(gpu for gpu in seen if self._guest in {None, gpu})}

    def _own(self, device: str) -> GpuId:
        gpu = GpuId(Place(device))
        if gpu == HOST or gpu not in self._visible():
            raise InvalidUse(f"device {device!r} is none of this session's GPUs")
        if not self._machine.alive(gpu):
            raise lost(gpu)
        return gpu

    def _number(self, kept: dict[int, Any]) -> int:
        check_room(kept)
        self._numbers += 1
        return self._numbers

    def hello(self, call: wire.Hello, _: Sequence[int]) -> None:
        """Versions must agree."""
        if call.version != wire.VERSION:
            raise InvalidUse(f"version {call.version} asked, the device process speaks {wire.VERSION}")
        self.reply(call.seq, self._machine.config)

    def devices(self, call: wire.Devices, _: Sequence[int]) -> None:
        """Those that the session may see."""
        self.reply(call.seq, [d for d in self._machine.devices() if self._guest in {None, d.id}])

    def links(self, call: wire.Links, _: Sequence[int]) -> None:
        """Those between places that the session may see."""
        seen = self._visible()
        self.reply(call.seq, [k for k in self._machine.links() if k.source in seen and k.target in seen])

    def memory(self, call: wire.Memory, _: Sequence[int]) -> None:
        """Held back while a device hangs."""
        seen = self._visible()
        self._machine.when_queries_return(seen, lambda: self.reply(call.seq, self._machine.memory(seen)))

    def create(self, call: wire.Create, _: Sequence[int]) -> None:
        """Guests create on their own GPU only."""
        granularity = self._machine.config.granularity
        if call.size <= 0 or call.size % granularity:
            raise InvalidUse(f"create: size {call.size}; must be a positive multiple of {granularity}")
        place = HOST if call.place == HOST and self._guest is None else self._own(call.place)
        check_room(self._handles.held, call.count)
        self.reply(call.seq, [self._handles.keep(a) for a in self._accounts.create(place, call.size, call.count)])

    def export(self, call: wire.Export, _: Sequence[int]) -> None:
        """A descriptor of an open file description of its own."""
        self.reply(call.seq, None, [self._handles.find("export", call.handle).export()])

    def adopt(self, call: wire.Adopt, fds: Sequence[int]) -> None:
        """Guests adopt memory of their own GPU and of the host only."""
        if len(fds) != 1:
            raise InvalidUse(f"adopt: {len(fds)} descriptors sent; must be 1")
        allocation = self._accounts.find(fds[0], call.size)
        if allocation.lost:
            raise lost(GpuId(allocation.place))
        if self._guest is not None and allocation.place not in {HOST, self._guest}:
            raise InvalidUse("adopt: the memory is on a GPU that this session does not see")
        self.reply(call.seq, [self._handles.keep(allocation), allocation.place])

    def release(self, call: wire.Release, _: Sequence[int]) -> None:
        """All or none."""
        self._handles.release(call.handles)
        self.reply(call.seq)

    def reserve(self, call: wire.Reserve, _: Sequence[int]) -> None:
        """Numbers only."""
        self.reply(call.seq, self._run.space.reserve(call.size, call.count))

    def unreserve(self, call: wire.Unreserve, _: Sequence[int]) -> None:
        """All or none."""
        self._run.space.unreserve(call.addresses)
        self.reply(call.seq)

    def map(self, call: wire.Map, _: Sequence[int]) -> None:
        """All or none."""
        wanted = [a for _, number in call.pairs if (a := self._handles.held.get(number)) is not None]
        for allocation in wanted:
            if allocation.lost:
                raise lost(GpuId(allocation.place))
        self._accounts.check_mapping({a.place for a in wanted})
        self._run.space.map(call.pairs, self._handles.held)
        self.reply(call.seq)

    def unmap(self, call: wire.Unmap, _: Sequence[int]) -> None:
        """All or none; under a copy it is the end of the session, as on hardware."""
        if not self._run.space.unmap(call.addresses):
            self._run.fault("memory was unmapped under a copy that had begun")
        self.reply(call.seq)

    def open(self, call: wire.Open, _: Sequence[int]) -> None:
        """Descriptors of what is mapped in a range, for access from the session's own process."""
        parts = self._run.space.parts(call.address, call.size)
        if len(parts) > wire.MAX_FDS:
            raise InvalidUse(
                f"the range has {len(parts)} mappings, {wire.MAX_FDS} can be had at once; ask for less of it"
            )
        fds: list[int] = []
        try:
            for part, _offset, _size in parts:
                if part.allocation.lost:
                    raise lost(GpuId(part.allocation.place))
                fds.append(part.allocation.export())
        except (DriverError, OSError):
            for fd in fds:
                os.close(fd)
            raise
        self.reply(call.seq, [(offset, size) for _, offset, size in parts], fds)

    def register_page(self, call: wire.RegisterPage, fds: Sequence[int]) -> None:
        """Pages are not counted as memory of any place."""
        if len(fds) != 1:
            raise InvalidUse(f"words: {len(fds)} descriptors sent; must be 1")
        if self._guest is not None and len(self._run.pages) >= PAGE_COUNT:
            raise InvalidUse(f"words: more than {PAGE_COUNT} pages in a guest's session")
        number = self._number(self._run.pages)
        page = self._machine.pages.register(fds[0], call.count)
        self._run.pages[number] = page
        self.reply(call.seq, number, [os.dup(page.doorbell)])

    def open_stream(self, call: wire.OpenStream, _: Sequence[int]) -> None:
        """On a GPU that the session sees."""
        gpu = self._own(call.device)
        number = self._number(self._run.streams)
        self._run.open_stream(number, gpu)
        self.reply(call.seq, number)

    def close_stream(self, call: wire.CloseStream, _: Sequence[int]) -> None:
        """Its graphs go with it."""
        stream = self._run.close_stream(call.stream)
        stream.when_still(lambda: self.reply(call.seq))

    def instantiate(self, call: wire.Instantiate, _: Sequence[int]) -> None:
        """Everything is checked here, so that a launch checks nothing."""
        stream = self._run.stream(call.stream)
        number = self._number(self._run.graphs)
        self._run.graphs[number] = stream, self._run.compile(call.ops)
        self.reply(call.seq, number)

    def synchronize(self, call: wire.Synchronize, _: Sequence[int]) -> None:
        """Answered when the stream is idle or failed, or the time is over."""
        stream = self._run.stream(call.stream)
        answered = False

        def idle() -> None:
            nonlocal answered
            answered = True
            if stream.error is not None:
                self.fail(call.seq, stream.error)
            else:
                self.reply(call.seq, result=True)

        def over() -> None:
            if not answered:
                stream.forget(idle)
                self.reply(call.seq, result=False)

        stream.when_idle(idle)
        if not answered:
            if call.timeout == 0:
                over()
            else:
                self._machine.loop.call_at(now() + int(call.timeout * 1e9), over)

    def health(self, call: wire.Health, _: Sequence[int]) -> None:
        """What came since the last time."""
        events = list(self._events)
        self._events.clear()
        self.reply(call.seq, events)

    def _privileged(self) -> None:
        if self._guest is not None:
            raise InvalidUse("a guest session may not do this")

    def guest(self, call: wire.Guest, _: Sequence[int]) -> None:
        """The session begins now; it ends when the last copy of the descriptor is closed."""
        self._privileged()
        gpu = self._own(call.device)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Session(self._machine, ours, gpu, self._ended)
        self.reply(call.seq, None, [theirs.detach()])

    def inject(self, call: wire.Inject, _: Sequence[int]) -> None:
        """A fault."""
        self._privileged()
        self._machine.inject(call.fault)
        self.reply(call.seq)

    def clear(self, call: wire.Clear, _: Sequence[int]) -> None:
        """The end of a fault."""
        self._privileged()
        self._machine.clear(call.fault)
        self.reply(call.seq)

    def shutdown(self, _call: wire.Shutdown, _: Sequence[int]) -> None:
        """The caller sees its connection end."""
        self._privileged()
        self._machine.loop.stop()


_CALLS: dict[type, Callable[[Session, Any, Sequence[int]], None]] = {
    wire.Bye: Session.bye,
    wire.Hello: Session.hello,
    wire.Devices: Session.devices,
    wire.Links: Session.links,
    wire.Memory: Session.memory,
    wire.Create: Session.create,
    wire.Export: Session.export,
    wire.Adopt: Session.adopt,
    wire.Release: Session.release,
    wire.Reserve: Session.reserve,
    wire.Unreserve: Session.unreserve,
    wire.Map: Session.map,
    wire.Unmap: Session.unmap,
    wire.Open: Session.open,
    wire.RegisterPage: Session.register_page,
    wire.OpenStream: Session.open_stream,
    wire.CloseStream: Session.close_stream,
    wire.Instantiate: Session.instantiate,
    wire.Synchronize: Session.synchronize,
    wire.Health: Session.health,
    wire.Guest: Session.guest,
    wire.Inject: Session.inject,
    wire.Clear: Session.clear,
    wire.Shutdown: Session.shutdown,
}
