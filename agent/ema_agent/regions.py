"""A client's regions: growing them as grants arrive, cutting them, renewing what was dropped."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from ema_agent.lease import GONE, Chunk, Lease, Region, State
from ema_agent.line import Line
from ema_agent.programs import Copies, Refusal
from ema_agent.steward import Steward
from ema_core import wire
from ema_core.ids import Place
from ema_core.wire import Kinds
from ema_driver.errors import DriverError

T = TypeVar("T")
PATIENCE: Final = 10.0
"""Seconds that runs under way may take before a region is not cut."""
LOST_PATIENCE: Final = 1.0
"""The same for a region with lost chunks: a run that has not passed them yet never ends."""
PAUSE: Final = 1e-3
LONGEST: Final = 86400.0
"""Seconds that a request may wait at most."""
DROPPED_PAGE: Final = 4096
"""Chunk numbers in one packet."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request for growth that waits for grants."""

    request: int
    region: Region
    before: int
    """Chunks that the region had before."""
    deadline: float
    renewed: frozenset[int] = frozenset()
    """For a renewal: the indices that were asked for again."""
    position: int = -1


def fetch_rate(region: Region, rate: Callable[[Place], int]) -> int:
    """Bytes per second of one fetch of a whole region: all of its bytes by the sum of what each place's take.

    Copies of one client run on one stream, one after the other. `rate` is that from a place; 0, also for the whole,
    where a path is barred. 0 for a region without bytes.
    """
    sizes = Counter[Place]()
    for chunk in region.chunks:
        if chunk is not None and chunk.state not in GONE:
            sizes[chunk.place] += chunk.size
    rates = {place: rate(place) for place in sizes}
    if not sizes or not all(rates.values()):
        return 0
    return round(sum(sizes.values()) / sum(size / rates[place] for place, size in sizes.items()))


class Regions:
    """Handles one client's messages about regions. Belongs to the agent's loop."""

    def __init__(self, lease: Lease, steward: Steward, copies: Copies, line: Line) -> None:
        self._lease, self._steward, self._copies, self._line = lease, steward, copies, line
        self.waiters: list[Waiter] = []
        self._changing: set[int] = set()
        """Regions that are being cut or renewed: one thing at a time, or chunks would be given back twice."""

    # --- messages ---

    def grow(self, message: wire.GrowRegion) -> None:
        """Make a region, or make it larger."""
        lease = self._lease
        count = self._chunks(message.size)
        region = lease.regions.get(message.region)
        if region is None:
            if not 0 <= message.region < wire.MAX_REGIONS:
                raise Refusal.bad("region", message.region, f"a number below {wire.MAX_REGIONS}")
            region = Region(message.region, message.droppable)
        elif region.droppable is not message.droppable:
            raise Refusal.bad("droppable", message.droppable, f"{region.droppable}, as the region was made")
        self._settled(region)
        deadline = self._deadline(message.timeout)
        before = len(region.chunks)
        if count < before or count == 0:
            least = max(1, before) * lease.chunk
            raise Refusal.bad("size", message.size, f"more than {least - lease.chunk} bytes (or shrink the region)")
        self._may_want(count - before)
        lease.regions[region.number] = region
        region.chunks += [None] * (count - before)
        self._wait(Waiter(message.id, region, before, deadline))

    def renew(self, message: wire.RenewRegion) -> None:
        """Ask for new memory in place of dropped chunks."""
        region = self._region(message.region)
        self._settled(region)
        deadline = self._deadline(message.timeout)
        gone = region.gone
        self._may_want(len(gone))

        async def work() -> None:
            chunks = [c for i in gone if (c := region.chunks[i]) is not None]
            await self._until_idle(chunks)
            region.holes.update(gone)  # from here on no run can name them
            await self.free(chunks)
            region.holes.clear()
            self._wait(Waiter(message.id, region, len(region.chunks), deadline, frozenset(gone)))

        self._line.later(message.id, self._alone(region, work()))

    def shrink(self, message: wire.ShrinkRegion) -> None:
        """Give back what is beyond a size."""
        region = self._region(message.region)
        self._settled(region)
        count = self._chunks(message.size)
        most = len(region.chunks)
        if count > most:
            raise Refusal.bad("size", message.size, f"at most the {most * self._lease.chunk} bytes there are")
        self._unused([c for c in region.chunks[count:] if c is not None])
        self._line.later(message.id, self._alone(region, self._cut(region, count)))

    def ask_dropped(self, message: wire.AskDropped) -> None:
        """Say which chunks are gone, in pages."""
        region = self._region(message.region)
        gone = region.gone
        for first in range(0, max(1, len(gone)), DROPPED_PAGE):
            page = gone[first : first + DROPPED_PAGE]
            self._line.send(wire.Dropped(message.id, region.number, page, first + DROPPED_PAGE < len(gone)))

    # --- what happens meanwhile ---

    def granted(self, region: Region) -> None:
        """Memory of this region arrived: answer whoever waited for the last of it."""
        if region.promised or region.missing:
            return
        for waiter in [w for w in self.waiters if w.region is region]:
            self.tell_rate(region, 0)
            self.waiters.remove(waiter)
            region.usable = len(region.chunks)
            self._line.send(wire.Done(waiter.request, len(region.chunks) * self._lease.chunk))

    def tell_rate(self, region: Region, moved: int) -> None:
        """Tell the client that so many bytes have moved, and at what rate a fetch of the whole region runs now."""
        rate = fetch_rate(region, partial(self._steward.node.rate, target=self._lease.gpu))
        self._line.tell(wire.Moved(region.number, moved, rate))

    def look(self, now: float) -> None:
        """From time to time: positions in the queue that changed, and requests whose time has run out."""
        entry = self._steward.waiting.get(self._lease.id)
        position = entry.position if entry is not None else 0
        for waiter in list(self.waiters):
            if now >= waiter.deadline and not waiter.region.promised:
                self.waiters.remove(waiter)
                self._line.later(waiter.request, self._alone(waiter.region, self._give_up(waiter, position)))
            elif entry is not None and position != waiter.position:
                waiter.position = position
                self._line.tell(wire.Queued(waiter.request, position, max(0.0, waiter.deadline - now)))

    def deadline(self, now: float) -> float | None:
        """Seconds until the first request that waits is answered in any case; None when nothing waits."""
        return min((max(0.0, w.deadline - now) for w in self.waiters), default=None)

    async def free(self, chunks: list[Chunk], *, certain: bool = False) -> None:
        """Give chunks back that no queued copy names any more.

        `certain` when no copy can be under way either and nobody else touches them (they are `busy` for the caller).
        Raises Held if a copy under way does not end; then nothing was given back.
        """
        steward = self._steward
        if not chunks:
            return
        if not certain:
            while any(c.busy or c.state is State.MOVING for c in chunks):
                self._still_there()
                await asyncio.sleep(PAUSE)
            for c in chunks:
                c.busy = True
            try:
                await steward.work.in_thread(steward.backing.take, chunks)
            except DriverError:
                for c in chunks:
                    c.busy = False
                raise
        held = [c for c in chunks if c.state not in (State.DROPPED, State.LOST)]
        with steward.node.changing({c.place for c in held}):
            for c in chunks:
                steward.ledger.free(c)
            await steward.work.in_thread(steward.backing.give_back, chunks)
            for c in held:
                steward.node.held(c.place, -c.size)
        steward.moves.held_changed()
        steward.wake()

    # --- inside ---

    def _wait(self, waiter: Waiter) -> None:
        if not self.waiters:
            self._lease.asked_at = time.monotonic()
        self.waiters.append(waiter)
        self.granted(waiter.region)
        self._steward.wake()

    async def _give_up(self, waiter: Waiter, position: int) -> int:
        region = waiter.region
        short = len(region.missing) * self._lease.chunk
        if waiter.renewed:
            # All or nothing: what arrived goes again, or zeros would pass for what was dropped.
            arrived = [c for i in waiter.renewed if (c := region.chunks[i]) is not None]
            region.holes |= waiter.renewed
            await self.free(arrived)
            self._steward.wake()
        else:
            await self._cut(region, waiter.before)
        text = f"{short} bytes were not to be had in time; place {position} in the queue"
        raise Refusal(Kinds.FULL, text, position=position)

    def _alone(self, region: Region, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        self._changing.add(region.number)

        async def alone() -> T:
            try:
                return await work
            finally:
                self._changing.discard(region.number)

        return alone()

    async def _cut(self, region: Region, count: int) -> int:
        await self._until_idle([c for c in region.chunks[count:] if c is not None])
        # From here to the cut nothing waits: no program or run can name these chunks again.
        gone = [c for c in region.chunks[count:] if c is not None]
        self._unused(gone)
        for index in [i for i in region.promised if i >= count]:
            self._steward.ledger.withdraw(self._lease, region, index)
        # Nobody waits for these any more.
        region.holes.update(range(count, len(region.chunks)))
        region.usable = min(region.usable, count)
        try:
            await self.free(gone)
        except (DriverError, Refusal):
            region.holes = {i for i in region.holes if region.chunks[i] is None}
            raise
        del region.chunks[count:]
        region.holes = {i for i in region.holes if i < count}
        if region.chunks:
            self.tell_rate(region, 0)
        else:
            self._lease.regions.pop(region.number, None)
        self._steward.wake()
        return count * self._lease.chunk

    async def _until_idle(self, chunks: Sequence[Chunk]) -> None:
        began = time.monotonic()
        while self._copies.busy(chunks):
            self._still_there()
            waited = time.monotonic() - began
            if waited > LOST_PATIENCE and any(c.state is State.LOST for c in chunks):
                raise Refusal(Kinds.IN_USE, "a run under way waits for bytes that are lost, for ever: close the pool")
            if waited > PATIENCE:
                raise Refusal(Kinds.IN_USE, "a run under way does not end: hand its slots over first")
            await asyncio.sleep(PAUSE)

    def _still_there(self) -> None:
        """Work for a client that is gone ends here: the end of its session gives everything back."""
        if self._lease.closing:
            raise Refusal(Kinds.GONE, "the client is gone")

    def _settled(self, region: Region) -> None:
        if region.number in self._changing or any(w.region is region for w in self.waiters):
            raise Refusal(Kinds.BUSY, f"region {region.number} is changing: wait for that answer first")

    def _unused(self, chunks: Sequence[Chunk]) -> None:
        if users := self._copies.users_of(chunks):
            raise Refusal(Kinds.IN_USE, f"programs {users} copy what would go: close them first")

    def _region(self, number: int) -> Region:
        region = self._lease.regions.get(number)
        if region is None:
            raise Refusal.bad("region", number, "a region that is open")
        return region

    def _chunks(self, size: int) -> int:
        if size < 0:
            raise Refusal.bad("size", size, "0 or more bytes")
        return -(-size // self._lease.chunk)

    def _deadline(self, timeout: float) -> float:
        if not timeout >= 0.0:
            raise Refusal.bad("timeout", timeout, "0 or more seconds")
        return time.monotonic() + min(timeout, LONGEST)

    def _may_want(self, chunks: int) -> None:
        lease = self._lease
        wanted = lease.wanted(droppable=False) + lease.wanted(droppable=True)
        more = chunks * lease.chunk
        if wanted + more > lease.limit:
            raise Refusal(
                Kinds.LIMIT,
                f"{more} bytes beside the {wanted} held or asked for pass this lease's limit of {lease.limit}",
                field="size",
                value=more,
                expected=f"at most {max(0, lease.limit - wanted)} more bytes",
            )
