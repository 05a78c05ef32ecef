"""A region: borrowed bytes, addressed by offset, stored from and fetched into slots of the client's own memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ema import arguments, errors
from ema.tickets import Ended, Ticket
from ema.window import Slot
from ema_core import wire
from ema_core.wire import CopyStep

if TYPE_CHECKING:
    from ema.pool import Pool

Buffer = bytes | bytearray | memoryview


class Region:
    """Borrowed bytes. Made by `Pool.region`; thread-safe as long as one slot is used by one thread at a time."""

    def __init__(self, pool: "Pool", number: int, *, droppable: bool) -> None:
        self._pool = pool
        self._session = pool.session
        self.number = number
        self.droppable = droppable
        """The agent may take its bytes without keeping them; then `Reclaimed` is raised before they can be used."""
        self.size = 0
        """Bytes granted: whole chunks."""
        self.rate = pool.rate
        """Bytes per second of one fetch of the whole region, its parts one after the other from where they are now.

        As far as the agent has said; 0 if a part cannot be fetched just now."""
        self.closed = False
        self._unsure = False
        """Growing it was interrupted: the agent may have made it larger than `size`."""
        self._gone: tuple[int, list[int]] | None = None
        """The notice word when we asked, and which chunks were gone then."""
        self.renewals = 0
        """How often chunks of it were renewed."""
        self._renewed: dict[int, int] = {}
        """Chunk → the renewal it came with."""

    def grow(self, size: int, timeout: float = 2.0) -> None:
        """Make the region at least `size` bytes large; all of it, or nothing changes.

        Raises PoolFull when `timeout` seconds were not enough, LimitReached, AgentLost, BadInput.
        """
        size, timeout = arguments.whole("size", size, 1), arguments.seconds("timeout", timeout)
        self.check()
        if size <= self.size:
            return
        if self._unsure:
            self.shrink(self.size)
        self._unsure = True
        try:
            answer = self._pool.ask_for_memory(lambda i: wire.GrowRegion(i, self.number, size, self.droppable, timeout))
        except errors.EmaError:
            self._unsure = False
            raise
        if isinstance(answer, wire.Done):
            self.size = answer.value
        self._unsure = False

    def shrink(self, size: int) -> None:
        """Give back what is beyond `size` bytes. Raises InUse while a program copies it, AgentLost, BadInput."""
        self.check()
        size = arguments.whole("size", size, 0, self.size)
        self._pool.ask(lambda i: wire.ShrinkRegion(i, self.number, size))
        self.size = -(-size // self._pool.chunk) * self._pool.chunk
        if not self.size:
            self._retire()

    def close(self) -> None:
        """Give everything back. Twice is harmless."""
        if self.closed:
            return
        if self._session == self._pool.session and self._pool.alive:
            self._pool.ask(lambda i: wire.ShrinkRegion(i, self.number, 0))
        self._retire()

    def store(self, source: Slot | Buffer, at: int, size: int | None = None) -> Ticket:
        """Copy to the region's bytes from `at` on.

        From a slot: it is handed over now (`fill`) and free again when the ticket has ended. From a buffer: through the
        pool's own staging slots; the ticket has ended when this returns. Raises BadInput, Reclaimed, AgentLost.
        """
        self.check()
        if isinstance(source, Slot):
            step = self.step(source, at, size)
            ticket = self._pool.run([step], store=True)
            source.fill()
            return ticket
        self._pool.staging.store(self, *self._span(at, arguments.buffer("source", source, writable=False), size))
        return Ended()

    def fetch(self, at: int, into: Slot | bytearray | memoryview, size: int | None = None) -> Ticket:
        """Copy the region's bytes from `at` on.

        Into a slot: returns at once; `Slot.wait` tells when they are there. Into a buffer: through the pool's own
        staging slots, and the bytes are there when this returns. Raises BadInput, Reclaimed, AgentLost.
        """
        self.check()
        if isinstance(into, Slot):
            return self._pool.run([self.step(into, at, size)], store=False)
        self._pool.staging.fetch(self, *self._span(at, arguments.buffer("into", into, writable=True), size))
        return Ended()

    def step(self, slot: object, at: int = 0, size: int | None = None, slot_at: int = 0) -> CopyStep:
        """One step of a program between this region and a slot. Raises BadInput."""
        if not isinstance(slot, Slot) or slot.pool is not self._pool:
            raise errors.BadInput("slot", repr(slot)[:80], "a slot of a window of this region's pool")
        if slot.closed:
            raise errors.BadInput("slot", f"{slot.number} of a closed window", "a slot of an open window")
        slot_at = arguments.whole("slot_at", slot_at, 0, slot.size - 1)
        length = arguments.whole("size", slot.size - slot_at if size is None else size, 1, slot.size - slot_at)
        self._within(at, length)
        return CopyStep(self.number, at, length, slot.number, slot_at)

    def gone(self) -> list[int]:
        """Chunks whose bytes were dropped, by index. Always empty for a region that is not droppable."""
        self.check()
        drops = self._pool.drops(self)
        chunks = self._pool.dropped_chunks(self)
        self._gone = (drops, chunks)
        return chunks

    def renew(self, timeout: float = 2.0) -> list[int]:
        """Ask for new memory (zeros) in place of dropped chunks; the chunks whose bytes have to be made again.

        Raises PoolFull, AgentLost.
        """
        timeout = arguments.seconds("timeout", timeout)
        chunks = self.gone()
        if chunks:
            self._pool.ask_for_memory(lambda i: wire.RenewRegion(i, self.number, timeout))
            # A fetch that began before this may have read what was dropped, or zeros.
            self.renewals += 1
            self._renewed.update(dict.fromkeys(chunks, self.renewals))
            self._gone = None
        return chunks

    def check_dropped(self, at: int, size: int, renewals: int | None = None) -> None:
        """Raise Reclaimed if any of `size` bytes from `at` on are gone, or were renewed since `renewals` renewals."""
        drops = self._pool.drops(self)
        if drops == 0:
            return
        if self._gone is None or self._gone[0] != drops:
            self.gone()
        gone = set(self._gone[1] if self._gone is not None else ())
        if renewals is not None and renewals != self.renewals:
            gone.update(c for c, n in self._renewed.items() if n > renewals)
        if gone and (hit := self.covers(sorted(gone), at, size)):
            raise errors.Reclaimed(self.number, hit, self._pool.chunk)

    def check(self) -> None:
        """Raise if the region is closed, or was borrowed from an agent that is gone."""
        if self.closed:
            raise errors.EmaError(f"region {self.number} is closed")
        if self._session != self._pool.session:
            raise errors.AgentLost(f"region {self.number} was lost with the agent that held it; make it again")
        self._pool.check_alive()
        self._pool.check_lost((self.number,))

    def covers(self, chunks: Sequence[int], at: int, size: int) -> list[int]:
        """Those of the chunks that hold any of `size` bytes from `at` on."""
        first, last = at // self._pool.chunk, (at + size - 1) // self._pool.chunk
        return [c for c in chunks if first <= c <= last]

    def _within(self, at: int, size: int) -> None:
        at = arguments.whole("at", at, 0)
        if at + size > self.size:
            raise errors.BadInput("at", f"{at}+{size}", f"within the region's {self.size} bytes")

    def _span(self, at: int, data: memoryview, size: int | None) -> tuple[int, memoryview]:
        length = arguments.whole("size", len(data) if size is None else size, 1, len(data))
        self._within(at, length)
        return at, data[:length]

    def _retire(self) -> None:
        self.closed = True
        self.size = 0
        self._pool.forget_region(self)
