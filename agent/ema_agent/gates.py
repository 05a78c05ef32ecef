"""Gates: how a chunk is taken from behind copies that are queued already and that only the borrower can let go.

A chunk is a stable address. Behind it the agent swaps memory; copies that name the address stay queued meanwhile, held
by words in a page that no client can reach. Each copy does, on its stream:

    wait slot · wait gate open · write busy 1 · wait gate open · [store: write dirty 1] · copy · write busy 0 · …

To take a chunk the agent closes its gate. Once every busy word of it reads 0 with the gate closed, no copy can touch
the chunk before the gate opens again: one that slipped past the first wait is stopped by the second. If a busy word
stays 1 for longer than a copy can take, the closing fell between the two waits of a copy: the gate is opened and closed
again.

Busy words are per direction, because a fetch and a store run on different streams and would hide each other. The store
in `Words.store` ends in a full memory fence, so that a busy word read after it cannot be older than the closing.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ema_driver.protocol import Copy, MemoryDriver, Op, Wait, Words, Write

GATE: Final = 0
BUSY_FETCH: Final = 1
BUSY_STORE: Final = 2
DIRTY: Final = 3
STRIDE: Final = 16
"""Words from one chunk to the next: a cache line each."""

CLOSED: Final = 0
OPEN: Final = 1
PAGE_CHUNKS: Final = 1024
LOOK: Final = 50e-6
"""Seconds between two looks at a busy word."""
FIRST_REOPEN: Final = 250e-6
LONGEST_COPY: Final = 0.02
"""Seconds for which a busy word stays 1 before it is taken for a copy stopped at the second wait: the first at first,
then twice as long each time, up to the other. Opening too early costs nothing but another wait."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The private words of one chunk."""

    page: Words
    base: int

    @property
    def dirty(self) -> bool:
        """Whether a store has touched the chunk since the word was last cleared."""
        return self.page.load(self.base + DIRTY) != 0

    def mark_clean(self) -> None:
        """The chunk's twin is true. Only while the gate is closed and certain."""
        self.page.store(self.base + DIRTY, 0)

    def mark_dirty(self) -> None:
        """The chunk's twin is not true, or there is none."""
        self.page.store(self.base + DIRTY, 1)

    def around(self, copy: Copy, *, store: bool) -> list[Op]:
        """The copy with its gate operations, for a client's stream."""
        page, base = self.page, self.base
        busy = base + (BUSY_STORE if store else BUSY_FETCH)
        ops: list[Op] = [
            Wait(page, base + GATE, OPEN),
            Write(page, busy, 1),
            Wait(page, base + GATE, OPEN),
        ]
        if store:
            ops.append(Write(page, base + DIRTY, 1))
        ops += [copy, Write(page, busy, 0)]
        return ops


class Gates:
    """All gates of one agent, in pages that only the agent maps."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._pages: list[Words] = []
        self._free: list[Gate] = []
        self._lock = threading.Lock()
        """Several worker threads make and give back gates."""
        self.reopened = 0
        """How often a closing fell between two waits."""

    def new(self) -> Gate:
        """A gate, closed, not busy, not dirty."""
        with self._lock:
            if not self._free:
                page = self._driver.words(PAGE_CHUNKS * STRIDE)
                self._pages.append(page)
                self._free = [Gate(page, i * STRIDE) for i in reversed(range(PAGE_CHUNKS))]
            return self._free.pop()

    def give_back(self, gate: Gate) -> None:
        """Return a gate that no queued operation names any more."""
        gate.page.fill([gate.base + i for i in (GATE, BUSY_FETCH, BUSY_STORE, DIRTY)], 0)
        with self._lock:
            self._free.append(gate)

    def open(self, gates: Sequence[Gate]) -> None:
        """Let copies pass."""
        for page, words in self._by_page(gates, GATE).items():
            page.fill(words, OPEN)

    def close(self, gates: Sequence[Gate]) -> None:
        """Stop copies that have not begun. Certain only after `certain`."""
        for page, words in self._by_page(gates, GATE).items():
            page.fill(words, CLOSED)

    def take(self, gates: Sequence[Gate], patience: float) -> list[Gate]:
        """Close the gates and wait until no copy can touch the chunks.

        Blocks the calling thread, asleep between looks, for as long as copies under way take; never for a borrower.
        Returns the gates that are not certain after `patience` seconds (their copies hang: a sick link); they stay
        closed.
        """
        self.close(gates)
        pending = self._busy(gates)
        start = time.monotonic()
        closed_at, limit = start, FIRST_REOPEN
        while pending:
            time.sleep(LOOK)
            pending = self._busy(pending)
            now = time.monotonic()
            if now - start > patience:
                break
            if pending and now - closed_at > limit:
                self.open(pending)
                time.sleep(LOOK)
                self.close(pending)
                self.reopened += len(pending)
                closed_at, limit = time.monotonic(), min(LONGEST_COPY, 2 * limit)
        return pending

    def clear_dirty(self, gate: Gate) -> bool:
        """Forget that the chunk was stored to, before it is copied; False (and dirty stays) if a store is under way.

        A store writes busy, then dirty, then copies. Clearing first and looking at busy afterwards leaves no order of
        the two in which a store is missed.
        """
        gate.page.store(gate.base + DIRTY, 0)
        if gate.page.load(gate.base + BUSY_STORE):
            gate.page.store(gate.base + DIRTY, 1)
            return False
        return True

    def close_pages(self) -> None:
        """Give the pages up, at the agent's end."""
        for page in self._pages:
            page.close()
        self._pages.clear()
        self._free.clear()

    @staticmethod
    def _busy(gates: Sequence[Gate]) -> list[Gate]:
        """Those that a copy has passed; in one go, as a decision looks at hundreds."""
        busy = []
        for gate in gates:
            load, base = gate.page.load, gate.base
            if load(base + BUSY_FETCH) or load(base + BUSY_STORE):
                busy.append(gate)
        return busy

    @staticmethod
    def _by_page(gates: Sequence[Gate], word: int) -> dict[Words, list[int]]:
        pages: dict[Words, list[int]] = {}
        for gate in gates:
            pages.setdefault(gate.page, []).append(gate.base + word)
        return pages
