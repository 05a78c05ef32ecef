"""One call: from what a node is to what to do now."""

from collections.abc import Sequence
from dataclasses import replace
from operator import add

from ema_core.plan import Plan, Waiting
from ema_core.policy.claims import entitle
from ema_core.policy.draft import Draft
from ema_core.policy.placement import satisfy
from ema_core.policy.victims import relieve
from ema_core.state import NodeState, PoolPolicy


def plan(state: NodeState, pools: Sequence[PoolPolicy], now: float) -> Plan:
    """What to move, drop and grant now, who waits, and what everybody is entitled to.

    `pools` are all pools that select this node; `now` is in seconds of the clock of the state's times. The same input
    in any order gives the same plan, and planning again after the plan was carried out gives nothing to do.

    Raises ValueError for two pools of one name, two GPUs or two leases of one id.
    """
    draft = Draft(state, pools, now)
    entitle(draft)
    relieve(draft)
    satisfy(draft)
    entitlement = dict(zip([lease.id for lease in draft.leases], draft.share, strict=True))
    if len(entitlement) != len(draft.leases):
        raise ValueError("leases: ids must differ")
    return replace(draft.finish(), waiting=_queue(draft), entitlement=entitlement)


def _queue(draft: Draft) -> tuple[Waiting, ...]:
    leases, held = draft.leases, list(map(add, draft.on_gpus, draft.on_host))
    most = list(map(min, map(add, draft.kept_wanted, draft.droppable_wanted), draft.limits))
    below = [i for i, (has, top) in enumerate(zip(held, most, strict=True)) if has < top]
    below.sort(key=draft.priority.__getitem__, reverse=True)
    queue: list[Waiting] = []
    for i in below:
        lease = leases[i]
        missing = min(lease.kept + lease.droppable, most[i]) - held[i]
        if missing > 0:
            queue.append(Waiting(lease.id, missing, len(queue)))
    return tuple(queue)
