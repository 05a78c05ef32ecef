"""From leases to entitlements.

Three fillings of the same kind, each by guaranteed amounts, then priority, then weight:

1. *Kept bytes against host room.* A kept byte needs a refuge, wherever it is; what is lent already has one.
2. *All bytes against GPU memory*, over the lenders that each borrower reaches.
3. *What is left against host memory*, the lender of last resort.
"""

from collections.abc import Callable, Sequence
from operator import add, gt

from ema_core.policy.draft import Draft
from ema_core.policy.entitlement import Claims, Shared, shares
from ema_core.policy.lendable import whole_chunks
from ema_core.policy.reach import bits, unions


def entitle(draft: Draft) -> None:
    """Set `gpu_share`, `share`, `kept_share` and `host_droppable` of the draft, in bytes."""
    leases, pools, pool_of = draft.leases, draft.pools, draft.pool_of
    chunks = [pool.chunk for pool in pools]
    host = draft.host
    weight = [lease.weight for lease in leases]
    priority = [lease.priority for lease in leases]
    assured = draft.assured if any(draft.assured) else None
    group_of, groups, reach, sheltered = _groups(draft)

    def tie(i: int) -> tuple[float, str]:
        return leases[i].asked_at, leases[i].id

    kept = draft.kept_wanted
    if not all(sheltered):
        kept = [k if sheltered[g] else 0 for k, g in zip(kept, group_of, strict=True)]
    by_pool = Claims(pool_of, weight, priority, chunks, tie)
    if any(map(gt, _sums(pool_of, kept, len(pools)), draft.host_room)):
        sunk = [held // chunks[p] * chunks[p] for held, p in zip(draft.kept_held, pool_of, strict=True)]
        filled = _fill(by_pool, sunk, assured, kept, [(room, (p,)) for p, room in enumerate(draft.host_room)])
        kept = list(map(min, filled, kept))
    draft.kept_share = kept
    wanted = list(map(min, draft.limits, map(add, kept, draft.droppable_wanted)))

    claims = Claims(group_of, weight, priority, [chunks[p] for p in groups], tie)
    draft.gpu_share = gpu_share = _fill(claims, None, assured, wanted, _shared(draft, tuple(reach)))
    draft.share = gpu_share
    short = [i for i, (s, w) in enumerate(zip(gpu_share, wanted, strict=True)) if s < w and draft.rate_of[i][host]]
    if short and any(draft.host_lend):
        draft.share = _fill_host(draft, short, wanted, tie)
    _split_host(draft)


def _fill_host(draft: Draft, short: list[int], wanted: list[int], tie: Callable[[int], tuple[float, str]]) -> list[int]:
    """Shares of GPU and host memory together, where GPU memory alone leaves leases short."""
    pools, leases, has = draft.pools, draft.leases, draft.gpu_share
    claims = Claims(
        [draft.pool_of[i] for i in short],
        [leases[i].weight for i in short],
        [leases[i].priority for i in short],
        [pool.chunk for pool in pools],
        lambda n: tie(short[n]),
    )
    low = [has[i] for i in short]
    lent = _sums(claims.group, low, len(pools))
    rooms = [(lent[p] + whole_chunks(room, pools[p].chunk), (p,)) for p, room in enumerate(draft.host_lend)]
    filled = _fill(claims, low, [draft.assured[i] for i in short], [wanted[i] for i in short], rooms)
    both = list(has)
    for i, amount in zip(short, filled, strict=True):
        both[i] = amount
    return both


def _sums(group: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    if count == 1:
        return [sum(sizes)]
    sums = [0] * count
    for g, size in zip(group, sizes, strict=True):
        sums[g] += size
    return sums


def _fill(
    claims: Claims,
    low: Sequence[int] | None,
    assured: Sequence[int] | None,
    high: Sequence[int],
    shared: Sequence[Shared],
) -> list[int]:
    """Guaranteed amounts first, the rest after them."""
    if low is None:
        low = [0] * len(high)
    else:
        high = list(map(max, low, high))
    if assured is not None:
        low = shares(claims, low, list(map(max, low, map(min, assured, high))), shared)
    return shares(claims, low, high, shared)


def _groups(draft: Draft) -> tuple[list[int], list[int], list[int], list[bool]]:
    """The group of each lease; each group's pool, the lenders it reaches as a bit mask, and if it reaches the host."""
    span, index = draft.span, draft.index
    keys = [(p, lease.gpu) for p, lease in zip(draft.pool_of, draft.leases, strict=True)]
    known = {key: group for group, key in enumerate(sorted(set(keys)))}
    reach: list[int] = []
    sheltered: list[bool] = []
    nowhere = [0] * (span + 1)
    for p, gpu in known:
        row, own = draft.rates.get(gpu, nowhere), index.get(gpu, -1)
        mask = 0
        for k in range(span):
            if row[k] and k != own and draft.places[k] in draft.pools[p].gpus:
                mask |= 1 << (p * span + k)
        reach.append(mask)
        sheltered.append(row[draft.host] > 0)
    return [known[key] for key in keys], [p for p, _ in known], reach, sheltered


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
    refuge = list(map(max, draft.kept_held, map(min, draft.kept_share, draft.share)))
    for p, size in enumerate(_sums(draft.pool_of, refuge, len(spoken))):
        spoken[p] += size
    draft.host_droppable = [room - taken for room, taken in zip(draft.host_room, spoken, strict=True)]
