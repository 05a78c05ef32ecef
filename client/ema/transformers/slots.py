"""Slots that all layers' rows pass through, in the order in which the model runs its layers, again and again."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch

from ema import errors
from ema.torch.feed import Feed, drain
from ema.torch.handover import handover
from ema.torch.memory import bytes_at, word_at
from ema.torch.poison import Poison
from ema.torch.watch import Watch
from ema.transformers.passage import roomy
from ema.transformers.rows import Rows, size_of, views_of
from ema_core import wire
from ema_driver.protocol import StreamOrdered

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.program import Program
    from ema.region import Region
    from ema.torch.order import Order
    from ema.window import Window
    from ema_driver.protocol import Words

FEW: Final = 4
"""So many layers, and there is one slot more: below, a second one would take more memory than it is worth."""


def slots_for(layers: int) -> int:
    """How many slots a cache of so many layers has."""
    return 2 if layers >= FEW else 1


class Slots:
    """Made for rows as they are; when any of them change, they are made anew."""

    feed: Feed
    poison: Poison | None = None
    """Where a stream waits, and cannot raise."""

    def __init__(
        self,
        connection: "Pool",
        rows: Sequence[tuple[Rows, ...]],
        regions: Mapping[int, "Region"],
        order: "Order",
        check: Callable[[], None],
    ) -> None:
        """`check` raises once anything is lost. Raises OutOfMemory, AgentLost, DataLost; nothing is held then."""
        self.rows = tuple(rows)
        """Of each layer, as they were when this was made."""
        self.check = check
        self.views: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Layer → keys and values in its slot."""
        self._order = order
        self._program: Program | None = None
        self._window: Window | None = None
        self._watch: Watch | None = None
        self._spoilt: Words | None = None
        sizes = {i: size for i, parts in enumerate(rows) if (size := size_of(parts))}
        try:
            grain = connection.granularity
            slot_bytes = -(-max(sizes.values()) // grain) * grain
            self._window = roomy(connection, slots_for(len(rows)), slot_bytes, order)
            self._slots = list(self._window.slots)
            pairs = [(i, self._slots[at % len(self._slots)]) for at, i in enumerate(sizes)]
            self._program = connection.program([regions[i].step(slot, 0, sizes[i]) for i, slot in pairs])
            self.feed = Feed(self._program, handover(connection), pairs, order, self)
            with torch.inference_mode(mode=False), torch.no_grad():
                for i, slot in pairs:
                    self.views[i] = views_of(rows[i], bytes_at(connection, slot.address, slot.size))
                if isinstance(connection.driver, StreamOrdered):
                    self._guard(connection)
            self.feed.begin()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of local memory."""
        return self._window.size if self._window is not None else 0

    def drain(self) -> None:
        """Let all that is under way end. Raises AgentLost, DataLost."""
        drain(self._slots, self.check, stores=False)

    def close(self) -> None:
        """Give the memory back. Whatever cannot be given back just now goes with the connection. Twice is harmless."""
        with suppress(errors.EmaError):
            if self._program is not None and hasattr(self, "feed"):
                self.feed.stop()
        self.views.clear()
        self.poison = None
        if self._watch is not None:
            self._watch.close()
        if self._spoilt is not None:
            self._spoilt.close()
        for held in (self._program, self._window):
            if held is not None:
                with suppress(errors.EmaError):
                    held.close()
        self._watch = self._spoilt = self._program = self._window = None

    def _guard(self, connection: "Pool") -> None:
        """On a GPU: let what waits for a lost agent pass, but spoil what it computes."""
        self._spoilt = connection.driver.words(1)
        over = word_at(connection, connection.notice, wire.NOTICE_OVER)
        self.poison = Poison(over, word_at(connection, self._spoilt, 0))
        self._watch = Watch(self.check, self._slots, self._spoilt, self._order.idle)
