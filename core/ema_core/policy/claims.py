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
from ema_core.policy.entitlement import fill
from ema_core.policy.lendable import whole_chunks
from ema_core.policy.reach import bits, unions
from ema_core.policy.seats import Shared
from ema_core.policy.standing import Standing


class _Facts(NamedTuple):
    """All that entitlements follow from."""

    standing: Standing

    # One entry per lease, older first
    kept: tuple[int, ...]
    droppable: tuple[int, ...]
    limit: tuple[int, ...]
    assured: tuple[int, ...]
    sunk: tuple[int, ...]
    """Kept bytes that have their refuge already; empty where there is refuge for all that is wanted."""

    # One entry per group
    sheltered: tuple[bool, ...]
    """Whether host memory is within its reach."""

    # One entry per pool
    host_room: tuple[int, ...]
    host_lend: tuple[int, ...]

    shared: tuple[Shared, ...]


class _Shares(NamedTuple):
    """Bytes for each lease: kept bytes with a refuge, GPU memory, and GPU and host memory together."""

    kept: Sequence[int]
    gpu: list[int]
    all: list[int]
    refuge: list[int]
    """Kept bytes entitled to both a refuge and memory."""


def entitle(draft: Draft) -> None:
    """Set `gpu_share`, `share`, `kept_share` and `host_droppable` of the draft, in bytes."""
    standing = draft.standing
    sheltered = tuple([row[draft.host] > 0 for row in draft.rates_of])
    kept = draft.kept_wanted
    if not all(sheltered):
        kept = tuple([k if sheltered[g] else 0 for k, g in zip(kept, standing.group, strict=True)])
    short = any(map(gt, standing.sums(kept), draft.host_room))
    facts = _Facts(
        standing=standing,
        kept=kept,
        droppable=draft.droppable_wanted,
        limit=draft.limits,
        assured=draft.assured,
        sunk=tuple(draft.kept_held) if short else (),
        sheltered=sheltered,
        host_room=tuple(draft.host_room) if short else (),
        host_lend=tuple(draft.host_lend),
        shared=_shared(draft),
    )
    draft.kept_share, draft.gpu_share, draft.share, refuge = _entitled(facts)
    refuges = standing.sums(list(map(max, draft.kept_held, refuge)))
    spoken = map(add, draft.droppable_on_host, refuges)
    draft.host_droppable = [room - taken for room, taken in zip(draft.host_room, spoken, strict=True)]


@lru_cache(maxsize=4)
def _entitled(facts: _Facts) -> _Shares:
    kept = _fill_refuge(facts) if facts.sunk else facts.kept
    wanted = list(map(min, facts.limit, map(add, kept, facts.droppable)))
    gpu = both = fill(facts.standing.by_lenders, [0] * len(wanted), facts.assured, wanted, facts.shared)
    if any(facts.host_lend) and gpu != wanted:
        both = _fill_host(facts, gpu, wanted)
    return _Shares(kept, gpu, both, list(map(min, kept, both)))


def _fill_refuge(facts: _Facts) -> list[int]:
    """Kept bytes that have, or can get, a refuge in host memory."""
    chunk = facts.standing.chunk
    sunk = [whole_chunks(held, chunk[p]) for held, p in zip(facts.sunk, facts.standing.pool, strict=True)]
    rooms = [(room, (p,)) for p, room in enumerate(facts.host_room)]
    filled = fill(facts.standing.by_pool, sunk, facts.assured, list(map(max, sunk, facts.kept)), rooms)
    return list(map(min, filled, facts.kept))


def _fill_host(facts: _Facts, gpu: list[int], wanted: list[int]) -> list[int]:
    """GPU and host memory together, where GPU memory alone leaves leases short."""
    standing = facts.standing
    rooms = [
        (lent + whole_chunks(room, chunk), (p,))
        for p, (lent, room, chunk) in enumerate(zip(standing.sums(gpu), facts.host_lend, standing.chunk, strict=True))
    ]
    if not all(facts.sheltered):
        wanted = [want if facts.sheltered[g] else has for want, has, g in zip(wanted, gpu, standing.group, strict=True)]
    return fill(standing.by_pool, gpu, facts.assured, wanted, rooms)


def _reach(draft: Draft) -> tuple[int, ...]:
    """The lenders that each group reaches, as a bit mask."""
    span, found = draft.span, []
    for (p, gpu), row in zip(draft.standing.groups, draft.rates_of, strict=True):
        own, selected = draft.index.get(gpu, -1), draft.pools[p].gpus
        mask = 0
        for k in range(span):
            if row[k] and k != own and draft.places[k] in selected:
                mask |= 1 << (p * span + k)
        found.append(mask)
    return tuple(found)


def _shared(draft: Draft) -> tuple[Shared, ...]:
    """What each union of lenders has for the groups inside it, in bytes, in whole chunks."""
    span, grow, caps = draft.span, draft.grow, draft.pool_grow
    found: list[Shared] = []
    for mask, groups in unions(_reach(draft), span):
        by_gpu: dict[int, int] = {}
        for bit in bits(mask):
            p, k = divmod(bit, span)
            by_gpu[k] = by_gpu.get(k, 0) + caps[p][k]
        found.append((sum([min(size, grow[k]) for k, size in by_gpu.items()]), groups))
    return tuple(found)
