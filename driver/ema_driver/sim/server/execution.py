"""What one session runs: its operations made ready, its copies begun, and the sticky error when one is a fault."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ema_core.ids import GpuId
from ema_driver.errors import ContextLost, InvalidUse
from ema_driver.sim import wire
from ema_driver.sim.server.lanes import Job, Segment
from ema_driver.sim.server.loop import now
from ema_driver.sim.server.machine import Machine
from ema_driver.sim.server.space import AddressSpace
from ema_driver.sim.server.streams import COPY, WAIT, WRITE, Compiled, Program, Stream, lost

if TYPE_CHECKING:
    from ema_driver.sim.server.pages import Page


class Execution:
    """Streams, graphs and pages by number, over one address space."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.space = AddressSpace(machine.accounts, machine.config.granularity)
        self.pages: dict[int, Page] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, tuple[Stream, Program]] = {}
        self.lost: ContextLost | None = None

    def open_stream(self, number: int, gpu: GpuId) -> None:
        """A new stream."""
        self.streams[number] = Stream(self._machine.loop, self._machine.pages, gpu, self._begin_copy)

    def close_stream(self, number: int) -> Stream:
        """Drop a stream's operations and its graphs. Raises InvalidUse."""
        stream = self.stream(number)
        del self.streams[number]
        self.graphs = {number: graph for number, graph in self.graphs.items() if graph[0] is not stream}
        stream.fail(InvalidUse("the stream was closed"))
        return stream

    def stream(self, number: int) -> Stream:
        """A stream by its number. Raises InvalidUse."""
        stream = self.streams.get(number)
        if stream is None:
            raise InvalidUse(f"stream {number} is unknown or closed")
        return stream

    def device_lost(self, gpu: GpuId) -> None:
        """End the streams that run on the device or move its bytes just now."""
        for stream in self.streams.values():
            job = stream.job
            touched = job is not None and any(part.allocation.place == gpu for part in job.parts)
            if stream.device == gpu or touched:
                stream.fail(lost(gpu))

    def fault(self, reason: str) -> None:
        """A sticky error: nothing of this session runs any more."""
        if self.lost is None:
            self.lost = ContextLost(reason)
            for stream in self.streams.values():
                stream.fail(self.lost)

    def give_up(self) -> None:
        """Stop everything and let go of mappings and pages."""
        for stream in self.streams.values():
            stream.fail(ContextLost("the session has ended"))
        self.space.clear()
        for page in self.pages.values():
            self._machine.pages.drop(page)
        self.pages.clear()

    def compile(self, ops: Sequence[wire.WireOp]) -> Program:
        """Check operations and make them ready. Raises InvalidUse."""
        return tuple(self._compiled(op) for op in ops)

    def _compiled(self, op: wire.WireOp) -> Compiled:
        if isinstance(op, wire.CopyOp):
            return COPY, op.target, op.source, op.size, None
        page = self.pages.get(op.page)
        if page is None:
            raise InvalidUse(f"page {op.page} is unknown or closed")
        count = len(page.words) - wire.HIDDEN_WORDS
        if op.index >= count:
            raise InvalidUse(f"word {op.index}; the page has {count}")
        return (WAIT if isinstance(op, wire.WaitOp) else WRITE), page.words, op.index, op.value, page

    def _begin_copy(self, stream: Stream, target: int, source: int, size: int) -> Job | None:
        segments: list[Segment] = []
        while size:
            to, of = self.space.find(target), self.space.find(source)
            if to is None or of is None:
                self.fault(f"a copy touched {target if to is None else source:#x}, where nothing is mapped")
                return None
            for part in (to, of):
                place = part.allocation.place
                if part.allocation.lost or not self._machine.alive(place):
                    stream.fail(lost(GpuId(place)))
                    return None
            lane = self._machine.lane(of.allocation.place, to.allocation.place)
            if lane is None:
                self.fault(f"a copy from {of.allocation.place} to {to.allocation.place}, which have no path")
                return None
            part_size = min(size, to.end - target, of.end - source)
            segments.append(
                Segment(
                    lane=lane,
                    target=to,
                    source=of,
                    write_to=to.allocation.base + target - to.address,
                    read_from=of.allocation.base + source - of.address,
                    left=part_size,
                )
            )
            target, source, size = target + part_size, source + part_size, size - part_size
        return Job(segments, stream.clock or now(), stream.finished) if segments else None
