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
    assured = draft.assured if any(draft.assured) else None
    group_of, groups, reach, sheltered = _groups(draft)

    def tie(i: int) -> tuple[float, str]:
        return leases[i].asked_at, leases[i].id

    kept = draft.kept_wanted
    if not all(sheltered):
        kept = [k if sheltered[g] else 0 for k, g in zip(kept, group_of, strict=True)]
    claims = Claims(group_of, draft.weight, draft.priority, [chunks[p] for p in groups], tie)
    if any(map(gt, draft.by_pool(kept), draft.host_room)):
        by_pool = Claims(pool_of, draft.weight, draft.priority, chunks, tie)
        sunk = [held // chunks[p] * chunks[p] for held, p in zip(draft.kept_held, pool_of, strict=True)]
        filled = _fill(by_pool, sunk, assured, kept, [(room, (p,)) for p, room in enumerate(draft.host_room)])
        kept = list(map(min, filled, kept))
    draft.kept_share = kept
    wanted = list(map(min, draft.limits, map(add, kept, draft.droppable_wanted)))

    draft.gpu_share = gpu_share = _fill(claims, None, assured, wanted, _shared(draft, tuple(reach)))
    draft.share = gpu_share
    if any(draft.host_lend) and gpu_share != wanted:
        reaches = [sheltered[g] for g in group_of]
        draft.share = _fill_host(
            draft, wanted, [i for i, r in enumerate(reaches) if r and gpu_share[i] < wanted[i]], tie
        )
    _split_host(draft)


def _fill_host(draft: Draft, wanted: list[int], short: list[int], tie: Callable[[int], tuple[float, str]]) -> list[int]:
    """Shares of GPU and host memory together, where GPU memory alone leaves leases short."""
    both = list(draft.gpu_share)
    claims = Claims(
        [draft.pool_of[i] for i in short],
        [draft.weight[i] for i in short],
        [draft.priority[i] for i in short],
        [pool.chunk for pool in draft.pools],
        lambda n: tie(short[n]),
    )
    low, high = [both[i] for i in short], [wanted[i] for i in short]
    lent = [0] * len(draft.pools)
    for p, has in zip(claims.group, low, strict=True):
        lent[p] += has
    rooms = [(lent[p] + whole_chunks(room, draft.pools[p].chunk), (p,)) for p, room in enumerate(draft.host_lend)]
    for i, amount in zip(short, _fill(claims, low, [draft.assured[i] for i in short], high, rooms), strict=True):
        both[i] = amount
    return both


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
    if assured is not None and any(map(gt, map(min, assured, high), low)):
        low = shares(claims, low, list(map(max, low, map(min, assured, high))), shared)
    return shares(claims, low, high, shared)


def _groups(draft: Draft) -> tuple[list[int], list[int], list[int], list[bool]]:
    """The group of each lease; each group's pool, the lenders it reaches as a bit mask, and if it reaches the host."""
    span, index = draft.span, draft.index
    keys = list(zip(draft.pool_of, draft.gpu, strict=True))
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
    for p, size in enumerate(draft.by_pool(refuge)):
        spoken[p] += size
    draft.host_droppable = [room - taken for room, taken in zip(draft.host_room, spoken, strict=True)]
