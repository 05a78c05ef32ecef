"""What becomes of a GPU's stream whose agent is gone. On simulated GPUs the CPU waits, and raises by itself.

A stream that waits for a slot cannot raise. So a thread looks after the agent; when it is gone, or bytes went with a
lender, the thread hands the slots over in its place, that the stream may pass. What the stream takes from slots then is
spoilt in the same pass as it is copied: NaN for numbers, 0 for others (indices must not point anywhere). The error
itself is raised where the host comes by next.
"""

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch

from ema import errors
from ema.torch.memory import word_at
from ema_core import wire
from ema_driver.errors import InvalidUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ema.pool import Pool
    from ema.window import Window

LOOK: Final = 0.02
"""Seconds between two looks at the agent."""
PUSH: Final = 1e-3
"""Seconds between two hand-overs in the place of an agent that is gone."""
_SPOILT: Final = wire.SLOT_WORDS - 1
"""A word of a slot's group that nobody else uses."""
_ONES: Final = 0xFFFFFFFF
_EVERY: Final = 512
"""Words of 8 bytes."""


class Guard:
    """Looks after one store window and one fetch window until it is closed."""

    def __init__(self, pool: "Pool", out: "Window", back: "Window") -> None:
        self._pool, self._page, self._session = pool, pool.shared, pool.session
        self._out, self._back = out, back
        self._word = back.first * wire.SLOT_WORDS + _SPOILT
        self._page.store(self._word, 0)
        self._flags = [
            [n * wire.SLOT_WORDS + wire.SLOT_FLAG for n in range(w.first, w.first + len(w))] for w in (out, back)
        ]
        self.lost: errors.EmaError | None = None
        """Why slots are handed over by this."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ema-spill-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is queued any more that waits for a slot. Twice is harmless."""
        self._end.set()
        self._thread.join()

    def words(self) -> "list[torch.Tensor]":
        """As the GPU sees them (int32): what this writes when it lets the stream pass, and what the agent writes."""
        places = ((self._page, self._word), (self._pool.notice, wire.NOTICE_OVER))
        return [word_at(self._pool, page, index)[0] for page, index in places]

    def _look(self) -> None:
        while not self._end.wait(LOOK):
            try:
                if self._pool.session != self._session:
                    raise errors.AgentLost("the agent went, and what was spilled with it; another is there")
                self._pool.runs.believe()
                for slot in (self._out[0], self._back[0]):
                    self._pool.check_slot(slot.number)
            except errors.EmaError as error:
                self.lost = error
                self._let_pass()
                return

    def _let_pass(self) -> None:
        with suppress(InvalidUse):  # a page that two later agents have replaced: nothing waits on it
            self._page.store(self._word, _ONES)
        while not self._end.wait(PUSH):
            for page in {id(p): p for p in (self._page, self._pool.shared)}.values():
                with suppress(InvalidUse):
                    page.fill(self._flags[0], wire.EMPTY)
                    page.fill(self._flags[1], wire.FULL)


class Mask:
    """Copies out of slots, spoiling what is copied once the words say so; in the order of the stream."""

    def __init__(self, words: "Sequence[torch.Tensor]") -> None:
        """`words`: one that is all ones, and one that is 1, when nothing is to be believed any more; 0 before."""
        self._ones, self._one = words
        self._mask = torch.zeros((), dtype=torch.int64, device=self._ones.device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, numbers: bool) -> None:
        """Copy bytes (uint8, a multiple of 8 of them). All ones is NaN in every format of numbers."""
        torch.sub(self._ones, self._one, out=self._mask)
        source, target = source.view(torch.int64), target.view(torch.int64)
        if numbers:
            torch.bitwise_or(source, self._mask, out=target)
        else:
            torch.bitwise_and(source, self._mask.bitwise_not(), out=target)

    def spoil(self, target: torch.Tensor) -> None:
        """The same for numbers that stay in their slot: one word in each 4 KiB of them."""
        torch.sub(self._ones, self._one, out=self._mask)
        target.view(torch.int64)[::_EVERY].bitwise_or_(self._mask)

    @property
    def spoilt(self) -> bool:
        """Whether anything that was copied is. Waits for the GPU: for when the agent is gone."""
        return bool(self._mask.item())
