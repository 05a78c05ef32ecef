"""What the agent says about itself, as plain data: for `ema status`, `ema leases`, the live view and the metrics."""

from typing import TYPE_CHECKING, Any

from ema_agent.lease import Lease, State
from ema_core.ids import HOST
from ema_core.plan import Cause

if TYPE_CHECKING:
    from ema_agent.agent import Agent

OWNERS: frozenset[Cause] = frozenset({Cause.HEADROOM, Cause.LIMIT, Cause.DRAIN, Cause.HEALTH})
"""Causes on the lender's side."""


def status(agent: "Agent", now: float) -> dict[str, Any]:
    """GPUs, host memory, paths, queue and what was counted. Amounts in bytes, times in seconds, rates in bytes/s."""
    node, ledger, figures = agent.node, agent.ledger, agent.figures
    states: dict[str, dict[State, int]] = {}
    for c in ledger.chunks():
        if (at := states.get(c.place)) is None:
            at = states[c.place] = dict.fromkeys(State, 0)
        at[c.state] += c.size
    gpus = []
    for gpu, device in sorted(node.devices.items(), key=lambda item: item[1].index):
        info = node.memory.get(gpu)
        gpus.append(
            {
                "id": gpu,
                "index": device.index,
                "product": device.product,
                "total": device.total,
                "reserved": info.reserved if info else None,
                "free": info.free if info else None,
                "used": node.used(gpu),
                "lent": ledger.lent[gpu],
                "states": states.get(gpu, {}),
                "leaked": node.leaked.get(gpu, 0),
                "draining": gpu in node.draining,
                "sick": node.unhealthy.get(gpu, ""),
                "skipped": node.skipped.get(gpu, ""),
                "shortfall_seconds": round(figures.shortfall_seconds.get(gpu, 0.0), 4),
            }
        )
    return {
        "driver": agent.driver.name,
        "ready": not agent.trouble,
        "trouble": agent.trouble,
        "time": now,
        "pools": list(agent.pools),
        "gpus": gpus,
        "host": {
            "held": agent.host_bytes,
            "spare": agent.backing.stock.spare_bytes,
            "lent": ledger.lent[HOST],
            "room": sum(p.host_spill + p.host_lend for p in agent.steward.pools.values()),
        },
        "paths": [{"source": s, "target": t, "rate": r} for (s, t), r in sorted(node.paths.items())],
        "barred": [{"source": s, "target": t, "why": w} for (s, t), w in sorted(node.barred.items())],
        "queue": [
            {"lease": w.lease, "short": w.short, "position": w.position}
            for w in sorted(agent.steward.waiting.values(), key=lambda w: w.position)
        ],
        "leases": len(ledger.leases),
        "counted": _counted(agent),
    }


def _counted(agent: "Agent") -> dict[str, Any]:
    figures = agent.figures
    return {
        "reclaims": [
            {
                "cause": cause,
                "clean": clean,
                "count": sum(d.counts),
                "seconds": d.total,
                "bytes": figures.reclaimed_bytes[cause, clean],
            }
            for (cause, clean), d in sorted(figures.reclaims.items())
        ],
        "recent_reclaims": [
            {"seconds": r.seconds, "own_seconds": r.own_seconds, "bytes": r.size, "clean": r.clean, "cause": r.cause}
            for r in figures.recent
            if r.cause in OWNERS
        ],
        "plans": sum(figures.plans.counts),
        "plan_seconds": figures.plans.total,
        "moved_bytes": dict(figures.moved_bytes),
        "lost_bytes": sum(figures.lost_bytes.values()),
        "overdue_bytes": figures.overdue_bytes,
        "reopened_gates": agent.gates.reopened,
        "repeats": agent.ledger.repeats,
    }


def leases(agent: "Agent", now: float) -> list[dict[str, Any]]:
    """Every lease: what it may have, wants and has. Amounts in bytes, times in seconds."""
    return [_lease(agent, entry, now) for entry in agent.ledger.leases.values()]


def _lease(agent: "Agent", entry: Lease, now: float) -> dict[str, Any]:
    session = agent.sessions.get(entry.id)
    waiting = agent.steward.waiting.get(entry.id)
    gone = [c for r in entry.regions.values() if r.torn for c in r.chunks if c is not None]
    return {
        "id": entry.id,
        "name": entry.name,
        "pool": entry.pool,
        "gpu": entry.gpu,
        "priority": entry.priority,
        "limit": entry.limit,
        "guaranteed": entry.guaranteed,
        "entitlement": agent.steward.entitlement.get(entry.id, 0),
        "wanted": entry.wanted(droppable=False) + entry.wanted(droppable=True),
        "held": {place: sum(a) for place, a in entry.held.items() if sum(a)},
        "dropped": sum(c.size for c in gone if c.state is State.DROPPED),
        "lost": sum(c.size for c in gone if c.state is State.LOST),
        "position": waiting.position if waiting else None,
        "deadline": session.regions.deadline(now) if session else None,
        "share": session.share.mapped if session else 0,
        "waited_seconds": session.waited if session else 0.0,
        "step_seconds": session.stepped if session else 0.0,
        "steps": session.steps if session else 0,
    }
