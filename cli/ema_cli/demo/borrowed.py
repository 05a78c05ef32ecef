"""Keys and values in neighbours' memory: stored once, fetched in every decode step, checked on every fetch.

All fetches of a macro-step are one message to the agent. The next one is sent while the last pieces of this one are
still on their way, so that the link never waits for this process.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf
from typing import Final

import ema
from ema_cli.demo.arena import Arena, Extent, parts
from ema_cli.demo.own import Kept, Own
from ema_cli.demo.pattern import Pattern

AT_ONCE: Final = 512
"""Copies in one message."""
RUNS: Final = 2
"""Messages under way."""
GAP: Final = 16 << 10
"""Bytes between two parts for which no copy of its own is made."""
PATIENCE: Final = 20.0
"""Real seconds that a copy may take."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one request within a piece."""

    begin: int
    """Within the piece."""
    kept: Kept
    at: int
    """Within the request."""
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one copy brings: bytes that lie side by side."""

    extent: Extent
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Coming:
    """A piece on its way into a slot."""

    piece: Piece
    slot: ema.Slot
    needed_at: float
    home: Own | None


class Borrowed:
    """A region, the window's slots, and the copies between them."""

    def __init__(self, pool: ema.Pool, pattern: Pattern, fetches: ema.Window, stores: ema.Window) -> None:
        self.arena = Arena()
        self.region: ema.Region | None = None
        self.wrong = 0
        """Bytes that were not the right ones when they came."""
        self.fetched = self.stored = 0
        """Real bytes."""
        self._pool, self._pattern = pool, pattern
        self._slot_bytes = fetches.slot_bytes
        self._fetch_slots = cycle(fetches.slots)
        self._store_slots, self._store_bytes = stores.slots, stores.slot_bytes
        self._coming: deque[_Coming] = deque()
        self._tickets: list[ema.Ticket] = []
        self._sent = self._came = 0
        self._cooling: deque[tuple[int, list[Extent]]] = deque()

    @property
    def coming(self) -> int:
        """Pieces on their way."""
        return len(self._coming)

    # --- room ---

    @property
    def held(self) -> int:
        """Real bytes borrowed, used or not."""
        return self.region.size if self.region is not None else 0

    def look(self) -> None:
        """See what has grown."""
        if self.held > self.arena.size:
            self.arena.resize(self.held)

    def shrink(self, size: int, kept: Iterable[Kept]) -> None:
        """Give back all but `size` bytes; what lies beyond moves down first."""
        self.settle()
        for one in kept:
            if any(extent.end > size for extent in one.extents):
                self._move(one, size)
        self.settle()
        self.arena.resize(size)
        if self.region is not None:
            self.region.shrink(size)
            if not size:
                self.region = None

    def _take(self, size: int) -> list[Extent]:
        if self.arena.free < size:
            self.settle()  # what was given back is not free while pieces from it are on their way
        return self.arena.take(size)

    def give(self, extents: list[Extent]) -> None:
        """A request's room is free as soon as no piece on its way comes from it."""
        self._cooling.append((self._sent, extents))
        self._cool()

    def _cool(self) -> None:
        while self._cooling and self._cooling[0][0] <= self._came:
            self.arena.give(self._cooling.popleft()[1])

    # --- copies ---

    def store(self, kept: Kept, last: int) -> None:
        """Store a request's bytes up to `last`. They may be on their way when this returns."""
        kept.extents += self._take(last - kept.written)
        for begin, extent in parts(kept.extents, kept.written, last):
            self._store(extent, self._pattern.bytes_of(kept.owner, begin, extent.size))
        kept.written = last

    def fetch(self, pieces: Sequence[Piece], *, needed_at: float, home: Own | None = None) -> None:
        """Begin to fetch pieces, for a use at the real moment `needed_at`; with `home`, to stay there."""
        self._wait_stores()
        for first in range(0, len(pieces), AT_ONCE):
            some = pieces[first : first + AT_ONCE]
            slots = [next(self._fetch_slots) for _ in some]
            region = self._open_region()
            steps = [region.step(s, p.extent.at, p.extent.size) for s, p in zip(slots, some, strict=True)]
            self._make_room()
            self._tickets.append(self._pool.run(steps, store=False))
            self._coming += [_Coming(p, s, needed_at, home) for s, p in zip(slots, some, strict=True)]
            self._sent += len(some)

    def receive(self, left: int = 0) -> None:
        """Take and check what comes, until at most `left` pieces are on their way."""
        while len(self._coming) > left:
            self._receive_one()

    def settle(self) -> None:
        """Receive all; no copy is under way when this returns."""
        self.receive()
        self._wait_stores()
        for ticket in self._tickets:
            ticket.wait(PATIENCE)
        self._tickets.clear()

    def pieces(self, kept: Iterable[Kept]) -> list[Piece]:
        """What one decode step reads of these requests. Small gaps come along, for fewer copies."""
        laid = sorted(
            ((extent.at, one, begin, extent) for one in kept for begin, extent in parts(one.extents, 0, one.written)),
            key=lambda entry: entry[0],
        )
        made: list[Piece] = []
        inside: list[Part] = []
        begin = end = 0
        for _, one, at, extent in laid:
            for offset, part in _cut(extent, self._slot_bytes):
                if inside and (part.at - end > GAP or part.end - begin > self._slot_bytes):
                    made.append(Piece(Extent(begin, end - begin), tuple(inside)))
                    inside = []
                if not inside:
                    begin = part.at
                inside.append(Part(part.at - begin, one, at + offset, part.size))
                end = part.end
        if inside:
            made.append(Piece(Extent(begin, end - begin), tuple(inside)))
        return made

    def _receive_one(self) -> None:
        coming = self._coming.popleft()
        view = coming.slot.wait(PATIENCE, needed_at=coming.needed_at)
        if view is None:
            raise ema.EmaError("a slot of simulated memory has no bytes")
        for part in coming.piece.parts:
            there = view[part.begin : part.begin + part.size]
            self.wrong += self._pattern.wrong(there, part.kept.owner, part.at)
            if coming.home is not None:
                coming.home.put(part.kept, part.at, bytes(there))
        coming.slot.release()
        self.fetched += coming.piece.extent.size
        self._came += 1
        self._cool()

    def _store(self, extent: Extent, data: bytes) -> None:
        region = self._open_region()
        cuts = list(_cut(extent, self._store_bytes))
        slots = [slot for slot, _ in zip(cycle(self._store_slots), cuts, strict=False)]
        self._wait_stores()
        self._make_room()
        steps = [region.step(slot, piece.at, piece.size) for slot, (_, piece) in zip(slots, cuts, strict=True)]
        self._tickets.append(self._pool.run(steps, store=True))
        for slot, (offset, piece) in zip(slots, cuts, strict=True):
            slot.wait_empty(PATIENCE, needed_at=inf)
            slot.view[: piece.size] = data[offset : offset + piece.size]
            slot.fill()
        self.stored += extent.size

    def _wait_stores(self) -> None:
        for slot in self._store_slots:
            slot.wait_empty(PATIENCE, needed_at=inf)

    def _make_room(self) -> None:
        """Until fewer messages are under way than the agent takes: only who empties slots lets them end."""
        while True:
            self._tickets = [ticket for ticket in self._tickets if not ticket.done]
            if len(self._tickets) < RUNS:
                return
            if self._coming:
                self._receive_one()
            else:
                self._tickets[0].wait(PATIENCE)

    def _move(self, kept: Kept, limit: int) -> None:
        """Bring a request's bytes below `limit`, through this process."""
        data = bytearray()
        self._wait_stores()
        for extent in kept.extents:
            for _, piece in _cut(extent, self._slot_bytes):
                slot = next(self._fetch_slots)
                self._open_region().fetch(piece.at, slot, piece.size).wait(PATIENCE)
                data += slot.view[: piece.size]
                slot.release()
        self.wrong += self._pattern.wrong(bytes(data), kept.owner, 0)
        self.arena.give(kept.extents)
        kept.extents = self.arena.take(len(data), below=limit)
        for begin, extent in parts(kept.extents, 0, len(data)):
            self._store(extent, bytes(data[begin : begin + extent.size]))

    def _open_region(self) -> ema.Region:
        if self.region is None:
            raise ema.EmaError("nothing is borrowed")
        return self.region


def _cut(extent: Extent, most: int) -> Iterator[tuple[int, Extent]]:
    """The extent in parts of at most `most` bytes: where a part begins in it, and the part."""
    for at in range(0, extent.size, most):
        yield at, Extent(extent.at + at, min(most, extent.size - at))
