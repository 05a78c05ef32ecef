"""From leases to entitlements.

Three fillings of the same kind, each by guaranteed amounts, then priority, then weight:

1. *Kept bytes against host room.* A kept byte needs a refuge, wherever it is; what is lent already has one.
2. *All bytes against GPU memory*, over the lenders that each borrower reaches.
3. *What is left against host memory*, the lender of last resort.
"""

from collections.abc import Sequence

from ema_core.policy.draft import Draft
from ema_core.policy.entitlement import Claims, Shared, shares
from ema_core.policy.reach import bits, unions


def entitle(draft: Draft) -> None:
    """Set `gpu_share`, `share`, `kept_share` and `host_droppable` of the draft, in bytes."""
    leases, pools, pool_of = draft.leases, draft.pools, draft.pool_of
    chunks = [pool.chunk for pool in pools]
    kept: list[int] = []
    droppable: list[int] = []
    limits: list[int] = []
    assured: list[int] = []
    host = draft.host
    kept_by_pool = [0] * len(pools)
    for lease, p, row in zip(leases, pool_of, draft.rate_of, strict=True):
        chunk = chunks[p]
        limit = lease.limit // chunk * chunk
        want = min(limit, -(-lease.kept // chunk) * chunk) if row[host] else 0
        kept.append(want)
        kept_by_pool[p] += want
        droppable.append(-(-lease.droppable // chunk) * chunk)
        limits.append(limit)
        assured.append(lease.guaranteed // chunk * chunk)
    weight = [lease.weight for lease in leases]
    priority = [lease.priority for lease in leases]

    def tie(i: int) -> tuple[float, str]:
        return leases[i].asked_at, leases[i].id

    by_pool = Claims(pool_of, weight, priority, chunks, tie)
    if any(want > room for want, room in zip(kept_by_pool, draft.host_room, strict=True)):
        sunk = [held // chunks[p] * chunks[p] for held, p in zip(draft.kept_held, pool_of, strict=True)]
        rooms = [(room, (p,)) for p, room in enumerate(draft.host_room)]
        kept = _fill(by_pool, sunk, assured, kept, rooms)
    draft.kept_share = kept
    wanted = [min(limit, k + d) for limit, k, d in zip(limits, kept, droppable, strict=True)]

    group_of, groups, reach = _groups(draft)
    shared = _shared(draft, tuple(reach))
    claims = Claims(group_of, weight, priority, [chunks[p] for p in groups], tie)
    draft.gpu_share = _fill(claims, [0] * len(leases), assured, wanted, shared)
    if draft.gpu_share == wanted:
        draft.share = wanted
    else:
        ask = [w if row[host] else s for w, s, row in zip(wanted, draft.gpu_share, draft.rate_of, strict=True)]
        lent = [0] * len(pools)
        for s, p in zip(draft.gpu_share, pool_of, strict=True):
            lent[p] += s
        rooms = [(lent[p] + room // chunks[p] * chunks[p], (p,)) for p, room in enumerate(draft.host_lend)]
        draft.share = _fill(by_pool, draft.gpu_share, assured, ask, rooms)
    _split_host(draft)


def _fill(
    claims: Claims, low: Sequence[int], assured: Sequence[int], high: Sequence[int], shared: Sequence[Shared]
) -> list[int]:
    """Guaranteed amounts first, the rest after them."""
    top = [max(lo, hi) for lo, hi in zip(low, high, strict=True)]
    if any(assured):
        floor = [max(lo, min(a, hi)) for lo, a, hi in zip(low, assured, top, strict=True)]
        low = shares(claims, low, floor, shared)
    return shares(claims, low, top, shared)


def _groups(draft: Draft) -> tuple[list[int], list[int], list[int]]:
    """The group of each lease; each group's pool, and the lenders it reaches as a bit mask."""
    span, index = draft.span, draft.index
    known: dict[tuple[int, str], int] = {}
    group_of: list[int] = []
    pools: list[int] = []
    reach: list[int] = []
    for i, lease in enumerate(draft.leases):
        key = (draft.pool_of[i], lease.gpu)
        group = known.get(key)
        if group is None:
            group = known[key] = len(pools)
            p, row, own = key[0], draft.rate_of[i], index.get(lease.gpu, -1)
            caps = draft.pools[p].gpus
            mask = 0
            for k in range(span):
                if row[k] and k != own and draft.places[k] in caps:
                    mask |= 1 << (p * span + k)
            pools.append(p)
            reach.append(mask)
        group_of.append(group)
    return group_of, pools, reach


def _shared(draft: Draft, reach: tuple[int, ...]) -> list[Shared]:
    """What each union of lenders has for the groups inside it, in bytes, in whole chunks."""
    span, grow, caps = draft.span, draft.grow, draft.pool_grow
    found: list[Shared] = []
    for mask, groups in unions(reach, span):
        by_gpu: dict[int, int] = {}
        for bit in bits(mask):
            p, k = divmod(bit, span)
            by_gpu[k] = by_gpu.get(k, 0) + caps[p][k]
        found.append((sum([min(size, grow[k]) for k, size in by_gpu.items()]), groups))
    return found


def _split_host(draft: Draft) -> None:
    spoken = list(draft.droppable_on_host)
    for p, held, kept, share in zip(draft.pool_of, draft.kept_held, draft.kept_share, draft.share, strict=True):
        spoken[p] += max(held, min(kept, share))
    draft.host_droppable = [room - taken for room, taken in zip(draft.host_room, spoken, strict=True)]
