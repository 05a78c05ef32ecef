"""Taking bytes from where they are: who loses first, and where the bytes go.

A lender's own demand beats every borrower. Bytes that leave a lender go to another lender with room, the fastest for
their borrower; else to host memory; else, if the borrower agreed to that, they are dropped; else they are overdue.
"""

from collections.abc import Iterable, Iterator
from itertools import compress
from operator import gt

from ema_core.plan import Cause
from ema_core.policy.draft import DROPPABLE, GONE, KINDS, Draft


def leave(draft: Draft, i: int, source: int, size: int, cause: Cause) -> int:
    """Take up to `size` bytes of lease `i` away from `source`; returns how many have somewhere to go."""
    gone = 0
    for kind in KINDS:
        here = draft.book(i)[source][kind]
        left = min(size - gone, here)
        for target, part in _destinations(draft, i, kind, left, source):
            draft.shift(i, kind, part, source, target, cause)
            if target in (GONE, draft.host):
                draft.reclaimed.add(i)
            gone += part
    return gone


def _destinations(draft: Draft, i: int, kind: int, size: int, source: int) -> Iterator[tuple[int, int]]:
    p = draft.pool_of[i]
    pool = draft.pools[p]
    if size and pool.spill_to_peer and draft.any_room(p):
        for lenders in draft.lenders(i):
            for room, k in sorted([(-draft.room(p, k), k) for k in lenders if k != source]):
                part = min(size, -room)
                if part:
                    yield k, part
                    size -= part
    if size and source != draft.host and draft.host_room[p] and draft.rates_to(i)[draft.host]:
        part = min(size, draft.host_room[p] - draft.pool_lent[p][draft.host])
        if kind == DROPPABLE:
            part = min(part, draft.host_droppable[p]) // pool.chunk * pool.chunk
        if part > 0:
            yield draft.host, part
            size -= part
    if size and kind == DROPPABLE and pool.spill_to_drop:
        yield GONE, size


def reclaim(draft: Draft, k: int, size: int, among: Iterable[int], cause: Cause) -> None:
    """Free `size` bytes at place `k`: lowest priority, then furthest above entitlement, then coldest.

    In each priority everybody first gives what is above its entitlement, only then the rest. What has nowhere to go is
    booked as overdue.
    """
    above = {i: draft.on_gpus[i] - draft.gpu_share[i] for i in among}
    order = sorted(
        above, key=lambda i: (draft.leases[i].priority, -above[i], draft.last_used(i, k), draft.leases[i].id)
    )
    for priority in sorted({draft.leases[i].priority for i in order}):
        tier = [i for i in order if draft.leases[i].priority == priority]
        for i in tier:
            size -= _leave(draft, i, k, min(size, max(0, above[i])), cause)
        for i in tier:
            size -= _leave(draft, i, k, size, cause)
    for i in order:
        size -= _strand(draft, i, k, size, cause)


def _leave(draft: Draft, i: int, k: int, size: int, cause: Cause) -> int:
    if size <= 0:
        return 0
    size = min(draft.chunks(i, size), draft.staying(i, k))
    return leave(draft, i, k, size, cause) if size > 0 else 0


def _strand(draft: Draft, i: int, k: int, size: int, cause: Cause) -> int:
    """Book up to `size` bytes as overdue; returns how many."""
    if size <= 0:
        return 0
    size = min(draft.chunks(i, size), draft.staying(i, k))
    if size > 0:
        draft.give_up(i, k, size, cause)
    return max(0, size)


def relieve(draft: Draft) -> None:
    """All that must leave, whoever asks: over a limit, over a barred path, off a GPU that lends no more or too much."""
    over = list(compress(range(len(draft.held)), map(gt, draft.held, draft.limits)))
    _shrink(draft, over)
    for i, k in draft.barred():
        _leave(draft, i, k, sum(draft.book(i)[k]), Cause.HEALTH)
        _strand(draft, i, k, sum(draft.book(i)[k]), Cause.HEALTH)
    for k in range(draft.span):
        refused = draft.refused[k]
        if refused is not None and draft.lent[k]:
            reclaim(draft, k, draft.lent[k], draft.holders(k), refused)
    _lighten(draft)
    _clear_host(draft)
    _still_over(draft, over)


def _lighten(draft: Draft) -> None:
    """GPUs that lend more than they may."""
    pools = range(len(draft.pools))
    for k in range(draft.span):
        if draft.refused[k] is not None or not draft.lent[k]:
            continue
        short = draft.lent[k] - draft.keep[k]
        if short > 0:
            reclaim(draft, k, short, draft.holders(k), Cause.HEADROOM)
        for p in pools:
            over = draft.pool_lent[p][k] - draft.pool_keep[p][k]
            if over > 0:
                among = [i for i in draft.holders(k) if draft.pool_of[i] == p]
                over -= sum([draft.overdue_at(i, k) for i in among])
                reclaim(draft, k, over, among, Cause.LIMIT)


def _clear_host(draft: Draft) -> None:
    """Host memory that is drained, or holds droppable bytes where kept ones need their refuge."""
    for p in range(len(draft.pools)):
        if not draft.host_drains and draft.host_droppable[p] >= 0:
            continue
        among = [i for i in draft.holders(draft.host) if draft.pool_of[i] == p]
        if draft.host_drains:
            reclaim(draft, draft.host, draft.pool_lent[p][draft.host], among, Cause.DRAIN)
        else:
            _yield_host(draft, -draft.host_droppable[p], among)


def _yield_host(draft: Draft, size: int, among: list[int]) -> None:
    """Droppable bytes make way in host memory for kept bytes, whose last refuge it is."""
    host = draft.host
    for i in sorted(among, key=lambda i: (draft.leases[i].priority, draft.last_used(i, host), draft.leases[i].id)):
        here = min(draft.chunks(i, size), draft.book(i)[host][DROPPABLE])
        gone = 0
        for target, part in _destinations(draft, i, DROPPABLE, here, host):
            draft.shift(i, DROPPABLE, part, host, target, Cause.LIMIT)
            draft.reclaimed.add(i)
            gone += part
        if gone < here:
            draft.give_up(i, host, here - gone, Cause.LIMIT)
        size -= here
        if size <= 0:
            return


def _shrink(draft: Draft, over_limit: list[int]) -> None:
    """A lease over its limit loses droppable bytes, slowest place first."""
    for i in over_limit:
        over = draft.held[i] - draft.leases[i].limit
        if not draft.pools[draft.pool_of[i]].spill_to_drop:
            continue
        for k in _slowest_first(draft, i):
            part = min(draft.chunks(i, over), draft.book(i)[k][DROPPABLE]) if over > 0 else 0
            if part:
                draft.shift(i, DROPPABLE, part, k, GONE, Cause.SHRINK)
                draft.reclaimed.add(i)
                over -= part


def _still_over(draft: Draft, over_limit: list[int]) -> None:
    """Kept bytes over a limit are nobody's to take: they are overdue where they ended, slowest place first."""
    for i in over_limit:
        over = draft.held[i] - draft.leases[i].limit
        for k in _slowest_first(draft, i):
            over -= _strand(draft, i, k, over, Cause.SHRINK)


def _slowest_first(draft: Draft, i: int) -> list[int]:
    row = draft.rates_to(i)
    return sorted(draft.book(i), key=lambda k: (row[k] if k < len(row) else 0, -k))
