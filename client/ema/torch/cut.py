"""Layers that are cut the same way, and all that they need: a connection, slots, a region, ranges, a program."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ema import errors
from ema.torch.feed import Feed, drain
from ema.torch.handover import handover
from ema.torch.layout import Layout
from ema.torch.memory import Range, word_at
from ema.torch.order import Order
from ema.torch.poison import Poison
from ema.torch.watch import Watch
from ema_core import wire
from ema_driver.errors import ContextLost
from ema_driver.protocol import StreamOrdered

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema_core.wire import CopyStep
    from ema_driver.protocol import Handle, Words


class Cut:
    """Made before anything is moved, so that what cannot be had is known by then."""

    feed: Feed
    _spoilt: "Words"

    def __init__(self, kept: "list[Cut]", pool: "Pool", layout: Layout, streams: Order, timeout: float) -> None:
        """`kept`: where this enters itself, so that nothing is lost that an interrupt leaves.

        Raises PoolFull, LimitReached, OutOfMemory, AgentLost; nothing is held then.
        """
        self.layout = layout
        self._streams = streams
        self._ranges: dict[int, Range] = {}
        self._storing = False
        self._watch: Watch | None = None
        self.poison: Poison | None = None
        """Where a stream waits, and cannot raise."""
        kept.append(self)
        try:
            self.connection = pool.another("weights")
            self._region = self.connection.region(layout.region, timeout=timeout)
            self._windows = [self.connection.window(1, layout.slot_bytes) for _ in range(layout.slots)]
            self._slots = [w[0] for w in self._windows]
            self._hand = handover(self.connection)
            steps = [self._step(i) for i in layout.order]
            pairs = [(i, self._slots[layout.slices[i].slot]) for i in layout.order]
            self._program = self.connection.program(steps)
            self.feed = Feed(self._program, self._hand, pairs, streams, self)
            if isinstance(self.connection.driver, StreamOrdered):
                self._guard()
        except BaseException:
            self.close()
            kept.remove(self)
            raise

    def _guard(self) -> None:
        """On a GPU: let what waits for a lost agent pass, but spoil what it computes."""
        connection = self.connection
        self._spoilt = connection.driver.words(1)
        over = word_at(connection, connection.notice, wire.NOTICE_OVER)
        self.poison = Poison(over, word_at(connection, self._spoilt, 0))
        self._watch = Watch(self.check, self._slots, self._spoilt, self._streams.idle)

    def check(self) -> None:
        """Raise AgentLost or DataLost if anything that was lent is gone."""
        connection = self.connection
        if connection.session != 1:
            raise errors.AgentLost("the weights went with the agent that had lent them: load the model again")
        connection.check_alive()
        connection.runs.believe()
        connection.check_lost((self._region.number,))

    def push(self, layer: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Make a layer's range, let `fill` write it, and store what is behind the cut. The range, as bytes.

        Raises OutOfMemory, AgentLost. `flush` before anything is taken.
        """
        one = self.layout.slices[layer]
        slot = self._slots[one.slot]
        self._streams.settle()  # the slot's last store may not have been handed over yet
        slot.wait_empty()
        pieces: list[Handle | int] = [one.local] if one.local else []
        self.drop(layer)
        range_ = self._ranges[layer] = Range(self.connection, [*pieces, self._windows[one.slot].handle])
        fill(range_.bytes)
        self._storing = True
        self.connection.run([self._step(layer)], store=True)
        self._hand.filled(slot)
        return range_.bytes

    def flush(self) -> None:
        """Wait until all that was pushed is in the region. Raises AgentLost, DataLost."""
        self._streams.settle()
        self.drain()

    def drain(self) -> None:
        """Let all that is under way end. Raises AgentLost, DataLost."""
        drain(self._slots, self.check, stores=self._storing)
        self._storing = False

    def pull(self, layers: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """One layer after the other, with its bytes. They are true until the next one is asked for.

        Raises AgentLost, DataLost. The feed begins anew afterwards.
        """
        if not layers:
            return
        self.check()
        self.feed.stop()
        for number, layer in enumerate(layers):
            for ahead in layers[number + bool(number) : number + 2]:
                self.connection.run([self._step(ahead)], store=False)
            slot = self._slots[self.layout.slices[layer].slot]
            self._streams.settle()  # nor may its last use be over; and what a thread waits for can raise
            slot.wait()
            yield layer, self._ranges[layer].bytes
            self._hand.emptied(slot)

    def reorder(self, order: Sequence[int]) -> None:
        """Fetch in this order from now on; the slots stay as they are. Raises AgentLost, DataLost."""
        self.feed.stop()
        layout = replace(self.layout, order=tuple(order))
        program = self.connection.program([self._step(i) for i in order])
        pairs = [(i, self._slots[layout.slices[i].slot]) for i in order]
        self.feed = Feed(program, self._hand, pairs, self._streams, self)
        before, self._program, self.layout = self._program, program, layout
        before.close()

    def memory(self, layer: int) -> torch.Tensor:
        """A layer's range, as bytes."""
        return self._ranges[layer].bytes

    def certain(self) -> None:
        """Wait until what was taken is there. Raises AgentLost or DataLost if it is not what it should be."""
        self._streams.settle()
        self.check()

    def drop(self, layer: int) -> None:
        """The layer is elsewhere by now: give the local memory of its range back."""
        if (range_ := self._ranges.pop(layer, None)) is not None:
            self._streams.settle()
            range_.close()

    def close(self) -> None:
        """Give everything back. Nothing may use any byte of it any more. Twice is harmless."""
        self.poison = None
        try:
            for layer in list(self._ranges):
                self.drop(layer)
        except ContextLost:
            self._ranges.clear()  # the GPU is gone, and all memory with it
        finally:
            if self._watch is not None:
                self._streams.settle()
                self._watch.close()
                self._spoilt.close()
            if hasattr(self, "connection"):
                self.connection.close()

    @property
    def runs(self) -> int:
        """How often all layers have been fetched, or begun to be."""
        return self._program.started

    @property
    def exposed_wait(self) -> float:
        """Seconds that the CPU has waited for slots."""
        return self.connection.exposed_wait if hasattr(self, "connection") else 0.0

    def _step(self, layer: int) -> "CopyStep":
        one = self.layout.slices[layer]
        return self._region.step(self._slots[one.slot], one.at, one.size)
