"""Giving leases what they are entitled to and do not have.

Every lease that is short of its entitlement is a *taker*. Takers come in the order of the queue. Each one uses, in this
order: room that is free; room that leases above their entitlement make; room that a neighbour makes by moving to where
the taker cannot go itself; host memory, the lender of last resort. On each step its new bytes come before those that
wait in host memory to be promoted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import gt, or_

from ema_core.plan import Cause
from ema_core.policy.draft import CLEAN, DIRTY, DROPPABLE, NEW, Draft
from ema_core.policy.lendable import whole_chunks
from ema_core.policy.victims import leave

FEW = 4
"""Over how many lenders bytes are spread where fewer would do: enough for their links, not so many that each demand
of a lender hits every lease."""


def spread(rooms: Sequence[int], want: int, chunk: int) -> list[int]:
    """How to take `want` bytes from `rooms` (all in whole chunks) so that what stays free is as even as can be."""
    order = sorted(range(len(rooms)), key=lambda k: -rooms[k])
    few = FEW
    while few < len(order) and sum([rooms[k] for k in order[:few]]) < want:
        few += 1
    order = order[:few]
    taken = [0] * len(rooms)
    left = min(want, sum([rooms[k] for k in order]))
    for count, k in enumerate(order, start=1):
        # The `count` roomiest are level with each other; lower them together to the next one's room.
        below = rooms[order[count]] if count < len(order) else 0
        step = rooms[k] - taken[k] - below
        if left < step * count:
            each = left // count // chunk * chunk
            left -= each * count
            for other in order[:count]:
                extra = min(chunk, left)
                taken[other] += each + extra
                left -= extra
            break
        for other in order[:count]:
            taken[other] += step
        left -= step * count
    return taken


@dataclass(slots=True)
class Taker:
    """A lease below its entitlement, and what it is still short of."""

    i: int
    seats: int
    """Bytes that it may get on GPUs: new ones and promoted ones."""
    kept: int
    """New bytes not to be lost."""
    droppable: int
    """New bytes that may be dropped."""
    starved: bool
    """Below its guaranteed amount."""


def takers(draft: Draft) -> list[Taker]:
    """Everybody who is short of something it is entitled to, first in the queue first."""
    found = []
    share, gpu_share, held, on_gpus = draft.share, draft.gpu_share, draft.held, draft.on_gpus
    below = map(or_, map(gt, share, held), map(gt, gpu_share, on_gpus))
    for i in compress(range(len(share)), below):
        entitled = share[i]
        lease = draft.leases[i]
        pool = draft.pools[draft.pool_of[i]]
        assured = min(whole_chunks(lease.guaranteed, pool.chunk), gpu_share[i])
        starved = on_gpus[i] < assured
        seats = gpu_share[i]
        if draft.now - lease.reclaimed_at < pool.min_hold or (i in draft.reclaimed and pool.min_hold > 0):
            seats = assured
        new = max(0, entitled - held[i])
        kept = min(new, max(0, draft.kept_share[i] - draft.kept_held[i]))
        asked = draft.chunks(i, lease.droppable)
        droppable = min(new - kept, max(0, asked - draft.droppable_held[i]))
        seats = min(max(0, seats - on_gpus[i]), kept + droppable + draft.on_host(i))
        if seats or kept or droppable:
            found.append(Taker(i, seats, kept, droppable, starved))
    found.sort(key=lambda taker: -draft.leases[taker.i].priority)
    return found


def satisfy(draft: Draft) -> None:
    """Serve all takers as far as can be.

    Bytes that were spilled earlier in the plan and then found a better place leave room behind them: hence the rounds.
    Each round that is followed by another brings somebody nearer to his entitlement and nobody under it.
    """
    while True:
        queue = takers(draft)
        if not queue or not _serve(draft, queue):
            return


def _serve(draft: Draft, queue: list[Taker]) -> bool:
    """Whether anybody got anything."""
    before = sum([taker.seats + taker.kept + taker.droppable for taker in queue])
    for taker in queue:
        _use_free(draft, taker)
    hungry = [taker for taker in queue if taker.seats]
    if hungry:
        _take_from_others(draft, hungry)
        for taker in hungry:
            if taker.seats:
                _make_neighbours_move(draft, taker)
    for taker in queue:
        _use_host(draft, taker)
    return sum([taker.seats + taker.kept + taker.droppable for taker in queue]) < before


def _seat(draft: Draft, taker: Taker, k: int, size: int) -> None:
    """Fill `size` bytes on GPU `k`: new kept bytes, new droppable ones, then what waits in host memory."""
    i, host = taker.i, draft.host
    taker.seats -= size
    part = min(size, taker.kept)
    if part:
        draft.shift(i, DIRTY, part, NEW, k, Cause.PROMOTE)
        taker.kept -= part
        size -= part
    part = min(size, taker.droppable)
    if part:
        draft.shift(i, DROPPABLE, part, NEW, k, Cause.PROMOTE)
        taker.droppable -= part
        size -= part
    for kind in (DIRTY, CLEAN, DROPPABLE):
        part = min(size, draft.book(i).get(host, (0, 0, 0))[kind]) if size else 0
        if part:
            draft.shift(i, kind, part, host, k, Cause.PROMOTE)
            size -= part


def _use_free(draft: Draft, taker: Taker) -> None:
    p, chunk = draft.pool_of[taker.i], draft.pools[draft.pool_of[taker.i]].chunk
    if not taker.seats or not draft.any_room(p):
        return
    for lenders in draft.lenders(taker.i):
        if not taker.seats:
            return
        rooms = [draft.room(p, k) for k in lenders]
        for k, part in zip(lenders, spread(rooms, taker.seats, chunk), strict=True):
            if part:
                _seat(draft, taker, k, part)


def _take_from_others(draft: Draft, hungry: list[Taker]) -> None:
    leases = draft.leases
    spare = [
        (leases[i].priority, draft.gpu_share[i] - draft.on_gpus[i], draft.last_used(i, k), leases[i].id, i, k)
        for i in compress(range(len(leases)), map(gt, draft.on_gpus, draft.gpu_share))
        for k, bytes_ in draft.book(i).items()
        if k < draft.span and any(bytes_)
    ]
    if not spare:
        return
    spare.sort()
    coming = [(i, k) for *_, i, k in spare]
    failed: set[tuple[int, str, int, bool]] = set()
    for taker in hungry:
        lease = leases[taker.i]
        kin = (draft.pool_of[taker.i], str(lease.gpu), lease.priority, taker.starved)
        if kin in failed:
            continue
        _take(draft, taker, coming)
        if taker.seats:
            failed.add(kin)


def _claimable(draft: Draft, taker: Taker, i: int) -> int:
    """Bytes in whole chunks that the taker may take from lease `i`, wherever they are."""
    above = draft.on_gpus[i] - draft.gpu_share[i]
    if above <= 0 or i == taker.i:
        return 0
    victim, lease = draft.leases[i], draft.leases[taker.i]
    if victim.priority >= lease.priority and not taker.starved:
        hold = draft.pools[draft.pool_of[i]].min_hold
        if draft.now - victim.granted_at < hold:
            return 0
    return draft.chunks(i, above)


def _above(draft: Draft, taker: Taker, i: int, k: int) -> int:
    """The same on GPU `k`."""
    claimable = _claimable(draft, taker, i)
    return min(claimable, draft.staying(i, k)) if claimable else 0


def _take(draft: Draft, taker: Taker, spare: list[tuple[int, int]]) -> None:
    p = draft.pool_of[taker.i]
    chunk, priority = draft.pools[p].chunk, draft.leases[taker.i].priority
    reach = {k for lenders in draft.lenders(taker.i) for k in lenders}
    # Where the pool's own limit binds, only the pool's own leases make room for it.
    bound = {k for k in reach if draft.pool_lent[p][k] + chunk > draft.pool_grow[p][k]}
    claimable = {i: _claimable(draft, taker, i) for i in {i for i, _ in spare}}
    offers: list[tuple[int, int]] = []
    total: dict[int, int] = {}
    for i, k in spare:
        if claimable[i] and k in reach and (k not in bound or draft.pool_of[i] == p):
            size = min(claimable[i], draft.staying(i, k))
            if size:
                offers.append((i, k))
                total[k] = total.get(k, 0) + size
    for i, k in offers:
        if not taker.seats:
            return
        if draft.free(p, k) + total[k] < chunk:
            continue
        size = min(_above(draft, taker, i, k), draft.chunks(i, max(0, taker.seats - draft.free(p, k))))
        cause = Cause.FAIRNESS if draft.leases[i].priority == priority else Cause.PRIORITY
        gone = leave(draft, i, k, size, cause) if size > 0 else 0
        total[k] -= gone
        room = min(taker.seats, draft.room(p, k))
        if room:
            _seat(draft, taker, k, room)


def _make_neighbours_move(draft: Draft, taker: Taker) -> None:
    """One-step exchange: somebody on a lender of the taker's moves to where the taker cannot go itself."""
    p = draft.pool_of[taker.i]
    reach = [k for lenders in draft.lenders(taker.i) for k in lenders]
    beyond = [k for k in range(draft.span) if k not in reach and _could_empty(draft, taker, k)]
    if not beyond:
        return
    for k in reach:
        for i in sorted(draft.holders(k), key=lambda i: (draft.leases[i].priority, i)):
            if not taker.seats:
                return
            bound = draft.pool_grow[p][k] - draft.pool_lent[p][k] < draft.pools[p].chunk
            if i != taker.i and draft.free(p, k) >= 0 and not (bound and draft.pool_of[i] != p):
                _exchange(draft, taker, i, k, beyond)


def _could_empty(draft: Draft, taker: Taker, k: int) -> bool:
    """Whether GPU `k` has free room, or bytes that the taker might claim if it reached them."""
    return draft.grow[k] > draft.lent[k] or any(_above(draft, taker, i, k) for i in draft.holders(k))


def _exchange(draft: Draft, taker: Taker, i: int, k: int, beyond: list[int]) -> None:
    p, pool = draft.pool_of[taker.i], draft.pools[draft.pool_of[i]]
    if not pool.spill_to_peer:
        return
    lower = draft.leases[i].priority < draft.leases[taker.i].priority
    cause = Cause.PRIORITY if lower else Cause.FAIRNESS
    row = draft.rates_to(i)
    for other in [each for lenders in draft.lenders(i) for each in lenders if each in beyond]:
        if row[other] < row[k] and not lower:
            continue
        for kind in (DROPPABLE, CLEAN, DIRTY):
            size = min(draft.book(i).get(k, (0, 0, 0))[kind], draft.chunks(i, taker.seats))
            if size <= 0 or draft.free(p, k) + size < draft.pools[p].chunk:
                continue
            size = min(size, _clear(draft, taker, i, other, size))
            if size:
                draft.shift(i, kind, size, k, other, cause)
                _seat(draft, taker, k, min(taker.seats, draft.room(p, k)))


def _clear(draft: Draft, taker: Taker, i: int, k: int, size: int) -> int:
    """Room on GPU `k` for `size` bytes of lease `i`, as far as leases above their entitlement can make it there."""
    q = draft.pool_of[i]
    kin = [j for j in draft.holders(k) if j != i and draft.pool_of[j] == q]
    offers = {j: above for j in kin if (above := _above(draft, taker, j, k))}
    if draft.free(q, k) + sum(offers.values()) >= draft.pools[q].chunk:
        for j in sorted(offers, key=lambda j: (draft.leases[j].priority, -offers[j], j)):
            missing = size - draft.free(q, k)
            if missing > 0:
                same = draft.leases[j].priority == draft.leases[taker.i].priority
                part = min(offers[j], draft.chunks(j, missing))
                leave(draft, j, k, part, Cause.FAIRNESS if same else Cause.PRIORITY)
    return draft.room(q, k)


def _use_host(draft: Draft, taker: Taker) -> None:
    """New bytes that no GPU has room for, in host memory, as far as the pool lends it."""
    i, host = taker.i, draft.host
    p = draft.pool_of[i]
    if not draft.rates_to(i)[host]:
        return
    chunk = draft.pools[p].chunk
    for kind, want in ((DIRTY, taker.kept), (DROPPABLE, taker.droppable)):
        room = draft.host_lend[p] - draft.pool_lent[p][host]
        if kind == DROPPABLE:
            room = min(room, draft.host_droppable[p])
        part = min(want, whole_chunks(room, chunk))
        if part:
            draft.shift(i, kind, part, NEW, host, Cause.PROMOTE)
            if kind == DROPPABLE:
                taker.droppable -= part
            else:
                taker.kept -= part
