"""The cleaner: in the background, lent chunks get a true copy in host memory, so that taking them is a drop.

One chunk at a time, on a stream of its own that never queues behind a borrower's wait. A chunk that is stored to while
it is copied, or afterwards, is dirty again and comes back later; one that is stored to all the time is asked less and
less.
"""

import asyncio
import time
from typing import Final

from ema_agent.lanes import Lanes
from ema_agent.lease import Chunk, State
from ema_agent.steward import Steward
from ema_core.ids import HOST
from ema_driver.errors import DriverError

LOOK: Final = 0.05
"""Seconds until the next look for work; twice as long after each that finds none."""
REST: Final = 0.4
"""Seconds between two looks at most."""
FIRST_RETRY: Final = 0.1
LAST_RETRY: Final = 5.0


class Cleaner:
    """Makes twins while nobody waits for them."""

    def __init__(self, steward: Steward, lanes: Lanes) -> None:
        self._steward = steward
        self._lanes = lanes
        self._retry: dict[int, tuple[float, float]] = {}
        """Chunk → when to try again, and the pause after that."""

    async def run(self) -> None:
        """Clean until cancelled."""
        pause = LOOK
        while True:
            self._look()
            await self._steward.moves.trim()
            work = self._candidates()
            if work:
                pause = LOOK
            else:
                await asyncio.sleep(pause)
                pause = min(REST, 2 * pause)
            for chunk in work:
                await self._clean(chunk)

    def _look(self) -> None:
        """Chunks that a store made dirty since they were cleaned."""
        ledger = self._steward.ledger
        live = set()
        for chunk in list(ledger.chunks()):
            live.add(chunk.id)
            if chunk.state is State.CLEAN and chunk.gate.dirty:
                ledger.become(chunk, State.DIRTY)
        self._retry = {i: r for i, r in self._retry.items() if i in live}

    def _candidates(self) -> list[Chunk]:
        now = time.monotonic()
        ready = [
            c
            for c in self._steward.ledger.chunks()
            if self._dirty(c) and not c.droppable and self._retry.get(c.id, (0.0, 0.0))[0] <= now
        ]
        ready.sort(key=lambda c: (c.last_used, c.id))
        return ready[:16]

    @staticmethod
    def _dirty(chunk: Chunk) -> bool:
        """To be cleaned, and nobody else is at it: a candidate that is passed over would be looked at without end."""
        return chunk.state is State.DIRTY and chunk.place != HOST and not chunk.busy

    async def _clean(self, chunk: Chunk) -> None:
        steward = self._steward
        if not self._dirty(chunk) or not steward.ledger.alive(chunk):
            return
        chunk.busy = True
        began = time.monotonic()
        try:
            done = await steward.work.in_thread(steward.backing.make_twin, chunk)
        except DriverError:
            done = False
        finally:
            chunk.busy = False
        if done:
            steward.ledger.become(chunk, State.CLEAN)
            self._retry.pop(chunk.id, None)
        else:
            pause = min(LAST_RETRY, 2 * self._retry.get(chunk.id, (0.0, FIRST_RETRY / 2))[1])
            self._retry[chunk.id] = (time.monotonic() + pause, pause)
        if steward.moves.passed_over:
            steward.wake()
        if cap := self._lanes.caps.get(chunk.place):
            await asyncio.sleep(max(0.0, chunk.size / cap - (time.monotonic() - began)))
