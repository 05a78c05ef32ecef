"""One call: from what a node is to what to do now."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

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
    entitlement = dict(zip(map(attrgetter("id"), draft.leases), draft.share, strict=True))
    if len(entitlement) != len(draft.leases):
        raise ValueError("leases: ids must differ")
    return replace(draft.finish(), waiting=_queue(draft), entitlement=entitlement)


def _queue(draft: Draft) -> tuple[Waiting, ...]:
    """Everybody who has less than he wants and may have."""
    leases, asked, held = draft.leases, draft.asked, draft.held
    queue: list[Waiting] = []
    for i in draft.standing.queue:
        short = asked[i] - held[i]
        if short > 0:
            queue.append(Waiting(leases[i].id, short, len(queue)))
    return tuple(queue)
