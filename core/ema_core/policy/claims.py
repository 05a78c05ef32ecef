"""From leases to entitlements.

Three fillings of the same kind, each by guaranteed amounts, then priority, then weight:

1. *Kept bytes against host room.* A kept byte needs a refuge, wherever it is; what is lent already has one.
2. *All bytes against GPU memory*, over the lenders that each borrower reaches.
3. *What is left against host memory*, the lender of last resort.

Entitlements depend on what is wanted and on what can be lent, hardly ever on what is held. Most plans of an agent find
both as they were: the last results are remembered.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import add, gt
from typing import NamedTuple

from ema_core.policy.draft import Draft
from ema_core.policy.entitlement import Claims, Shared, shares
from ema_core.policy.lendable import whole_chunks
from ema_core.policy.reach import bits, unions


class _Facts(NamedTuple):
    """All that entitlements follow from."""

    # One entry per lease, older first
    group: tuple[int, ...]
    pool: tuple[int, ...]
    weight: tuple[int, ...]
    priority: tuple[int, ...]
    kept: tuple[int, ...]
    droppable: tuple[int, ...]
    limit: tuple[int, ...]
    assured: tuple[int, ...]
    sunk: tuple[int, ...]
    """Kept bytes that have their refuge already; empty where there is refuge for all that is wanted."""

    # One entry per group
    group_chunk: tuple[int, ...]
    sheltered: tuple[bool, ...]
    """Whether host memory is within its reach."""

    # One entry per pool
    chunk: tuple[int, ...]
    host_room: tuple[int, ...]
    host_lend: tuple[int, ...]

    shared: tuple[Shared, ...]


class _Shares(NamedTuple):
    """Bytes for each lease: kept bytes with a refuge, GPU memory, and GPU and host memory together."""

    kept: list[int]
    gpu: list[int]
    all: list[int]


def entitle(draft: Draft) -> None:
    """Set `gpu_share`, `share`, `kept_share` and `host_droppable` of the draft, in bytes."""
    group_of, pools, reach, sheltered = _groups(draft)
    chunks = [pool.chunk for pool in draft.pools]
    kept = draft.kept_wanted
    if not all(sheltered):
        kept = [k if sheltered[g] else 0 for k, g in zip(kept, group_of, strict=True)]
    short = any(map(gt, draft.by_pool(kept), draft.host_room))
    facts = _Facts(
        group=tuple(group_of),
        pool=tuple(draft.pool_of),
        weight=tuple(draft.weight),
        priority=tuple(draft.priority),
        kept=tuple(kept),
        droppable=tuple(draft.droppable_wanted),
        limit=tuple(draft.limits),
        assured=tuple(draft.assured),
        sunk=tuple(draft.kept_held) if short else (),
        group_chunk=tuple([chunks[p] for p in pools]),
        sheltered=tuple(sheltered),
        chunk=tuple(chunks),
        host_room=tuple(draft.host_room) if short else (),
        host_lend=tuple(draft.host_lend),
        shared=_shared(draft, tuple(reach)),
    )
    draft.kept_share, draft.gpu_share, draft.share = _entitled(facts)
    spoken = list(draft.droppable_on_host)
    refuge = list(map(max, draft.kept_held, map(min, draft.kept_share, draft.share)))
    for p, size in enumerate(draft.by_pool(refuge)):
        spoken[p] += size
    draft.host_droppable = [room - taken for room, taken in zip(draft.host_room, spoken, strict=True)]


@lru_cache(maxsize=4)
def _entitled(facts: _Facts) -> _Shares:
    kept = list(facts.kept)
    if facts.sunk:
        kept = _fill_refuge(facts)
    wanted = list(map(min, facts.limit, map(add, kept, facts.droppable)))
    claims = Claims(facts.group, facts.weight, facts.priority, facts.group_chunk)
    gpu = _fill(claims, [0] * len(wanted), facts.assured, wanted, facts.shared)
    if any(facts.host_lend) and gpu != wanted:
        return _Shares(kept, gpu, _fill_host(facts, gpu, wanted))
    return _Shares(kept, gpu, gpu)


def _fill(
    claims: Claims, low: Sequence[int], assured: Sequence[int], high: Sequence[int], shared: Sequence[Shared]
) -> list[int]:
    """Guaranteed amounts first, the rest after them."""
    shared = claims.scarce(high, shared)
    if not shared:
        return list(high)
    floor = list(map(max, low, map(min, assured, high)))
    if any(map(gt, floor, low)):
        low = shares(claims, low, floor, shared)
    return shares(claims, low, high, shared)


def _fill_refuge(facts: _Facts) -> list[int]:
    """Kept bytes that have, or can get, a refuge in host memory."""
    claims = Claims(facts.pool, facts.weight, facts.priority, facts.chunk)
    sunk = [whole_chunks(held, facts.chunk[p]) for held, p in zip(facts.sunk, facts.pool, strict=True)]
    rooms = [(room, (p,)) for p, room in enumerate(facts.host_room)]
    filled = _fill(claims, sunk, facts.assured, list(map(max, sunk, facts.kept)), rooms)
    return list(map(min, filled, facts.kept))


def _fill_host(facts: _Facts, gpu: list[int], wanted: list[int]) -> list[int]:
    """GPU and host memory together, where GPU memory alone leaves leases short."""
    both = list(gpu)
    group, sheltered, pool = facts.group, facts.sheltered, facts.pool
    short = [i for i, has in enumerate(gpu) if has < wanted[i] and sheltered[group[i]]]
    lent = [0] * len(facts.chunk)
    for i in short:
        lent[pool[i]] += gpu[i]
    rooms = [(lent[p] + whole_chunks(room, facts.chunk[p]), (p,)) for p, room in enumerate(facts.host_lend)]
    weight, priority = [facts.weight[i] for i in short], [facts.priority[i] for i in short]
    claims = Claims([pool[i] for i in short], weight, priority, facts.chunk)
    low, assured, high = [gpu[i] for i in short], [facts.assured[i] for i in short], [wanted[i] for i in short]
    for i, amount in zip(short, _fill(claims, low, assured, high, rooms), strict=True):
        both[i] = amount
    return both


def _groups(draft: Draft) -> tuple[list[int], list[int], list[int], list[bool]]:
    """The group of each lease; each group's pool, the lenders it reaches as a bit mask, and if it reaches the host."""
    span, index = draft.span, draft.index
    keys = list(zip(draft.pool_of, draft.gpu, strict=True))
    known = {key: group for group, key in enumerate(sorted(set(keys)))}
    reach: list[int] = []
    sheltered: list[bool] = []
    nowhere = [0] * (span + 1)
    for p, gpu in known:
        row, own, selected = draft.rates.get(gpu, nowhere), index.get(gpu, -1), draft.pools[p].gpus
        mask = 0
        for k in range(span):
            if row[k] and k != own and draft.places[k] in selected:
                mask |= 1 << (p * span + k)
        reach.append(mask)
        sheltered.append(row[draft.host] > 0)
    return [known[key] for key in keys], [p for p, _ in known], reach, sheltered


def _shared(draft: Draft, reach: tuple[int, ...]) -> tuple[Shared, ...]:
    """What each union of lenders has for the groups inside it, in bytes, in whole chunks."""
    span, grow, caps = draft.span, draft.grow, draft.pool_grow
    found: list[Shared] = []
    for mask, groups in unions(reach, span):
        by_gpu: dict[int, int] = {}
        for bit in bits(mask):
            p, k = divmod(bit, span)
            by_gpu[k] = by_gpu.get(k, 0) + caps[p][k]
        found.append((sum([min(size, grow[k]) for k, size in by_gpu.items()]), groups))
    return tuple(found)
