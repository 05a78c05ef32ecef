"""What the computation takes from a program that fetches all layers, one step ahead, again and again.

The program's fetches come in one order, into slots that are used in turn. Whatever the model does, the feed takes them
in that order: one that was skipped is handed back unused, and a layer that runs again is fetched again. So the flags of
the slots, which say only *full* and *empty*, always mean what they should.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ema.torch.order import Order

if TYPE_CHECKING:
    from ema.program import Program
    from ema.torch.handover import Handover
    from ema.window import Slot

PAUSE: Final = 0.0005
"""Seconds between two looks while runs are drained."""


class Rest(Protocol):
    """What else is under way on the program's connection."""

    def check(self) -> None:
        """Raise AgentLost or DataLost if anything that was lent is gone."""
        ...

    def drain(self) -> None:
        """Let all of it end; then all slots are empty."""
        ...


class Feed:
    """Hands out layers. One thread at a time."""

    def __init__(
        self,
        program: "Program",
        hand: "Handover",
        steps: "Sequence[tuple[int, Slot]]",
        streams: Order,
        rest: "Rest",
    ) -> None:
        """`steps`: layer and slot of each step of the program."""
        self._check, self._drain = rest.check, rest.drain
        self._program, self._hand, self._streams = program, hand, streams
        self._order, self._slots = tuple(layer for layer, _ in steps), tuple(slot for _, slot in steps)
        self._ahead = len(self._order) // 2
        """Where in a step the next one's run is started: not at its beginning, so that the CPU may be half a step ahead
        of the GPU before it waits."""
        self._taken = 0
        """Fetches handed back since the first run began."""
        self._first = 1
        """Number of that run."""
        self._held = False
        """The next fetch has been waited for, and its slot is not handed back yet."""
        self._certain = False
        """Whether the above is known: not while a change is under way that may be interrupted."""

    def take(self, layer: int) -> None:
        """From now on the layer's bytes are in its slot, until another is taken or `done`.

        Raises AgentLost, DataLost.
        """
        self._check()
        if not self._certain:
            self.begin()
        self._streams.follow()
        order, length = self._order, len(self._order)
        if self._held:
            if order[self._taken % length] == layer:
                return
            self.done()
        while True:
            at = self._taken % length
            self._certain = False
            if at == self._ahead and self._program.started == self._first + self._taken // length:
                self._program.start()
            self._hand.await_full(self._slots[at])
            self._held = self._certain = True
            if order[at] == layer:
                return
            self.done()

    def done(self) -> None:
        """The layer that was taken has been used: its slot may be filled anew."""
        if self._held and self._certain:
            self._certain = False
            self._hand.emptied(self._slots[self._taken % len(self._order)])
            self._taken += 1
            self._held = False
            self._certain = True

    def begin(self) -> None:
        """Start the first run: its first fetches are there when the first layer wants them.

        Raises AgentLost, DataLost.
        """
        self._check()
        self.stop()
        self._first, self._taken = self._program.started + 1, 0
        self._program.start()
        self._certain = True

    def stop(self) -> None:
        """Let what is under way end. The next `take` begins anew. Raises AgentLost, DataLost."""
        self._certain = self._held = False
        self._streams.settle()
        self._drain()


def drain(slots: "Sequence[Slot]", check: Callable[[], None], *, stores: bool) -> None:
    """Hand slots over until all runs of their connection have ended; then all are empty. No stream may wait for any.

    Bytes in the slots stay as they are where only stores are under way. Raises AgentLost, DataLost.
    """
    slots, pool = list(dict.fromkeys(slots)), slots[0].pool
    while pool.runs.busy:
        check()
        for slot in slots:
            if slot.full != stores:
                if stores:
                    slot.fill()
                else:
                    slot.release()
        time.sleep(PAUSE)
    for slot in slots:
        slot.reset()
