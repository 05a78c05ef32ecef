"""How long `plan` takes: servers in steady state with a mix of holdings, and an event before each plan.

Run `python bench/plan.py`; it prints the figures and keeps them in `bench/results/plan.json`.
"""

import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import quantiles
from typing import Any

from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName
from ema_core.plan import Plan
from ema_core.policy import apply, plan
from ema_core.state import Gpu, Lease, NodeState, PoolPolicy
from record import Row, at_most, finish, plain, record

WHAT = "The policy: one call of `plan`, processor time"
GIB = 1 << 30
CHUNK = 64 << 20


def pool(gpus: list[GpuId]) -> PoolPolicy:
    return PoolPolicy(
        name=PoolName("bench"),
        gpus=frozenset(gpus),
        max_per_gpu=dict.fromkeys(gpus, 100 * GIB),
        headroom=2 * GIB,
        hysteresis=GIB,
        chunk=CHUNK,
        host_spill=64 * GIB * len(gpus),
        host_lend=8 * GIB,
    )


def wish(mean: int, dice: random.Random) -> int:
    """Bytes that one lease wants: half of `mean` to one and a half times as much, to the nearest chunk."""
    return (dice.randrange(mean // 2, mean * 3 // 2) + CHUNK // 2) // CHUNK * CHUNK


def server(count: int, leases: int, load: float, dice: random.Random) -> NodeState:
    """A full mesh whose leases want `load` times what is idle, in three tiers, a third of it kept."""
    ids = [GpuId(Place(f"GPU-{k:02d}")) for k in range(count)]
    gpus = tuple(Gpu(i, 141 * GIB, GIB // 2, dice.randrange(40, 100) * GIB) for i in ids)
    paths: dict[tuple[Place, Place], int] = {(a, b): 400 * 10**9 for a in ids for b in ids if a != b}
    for i in ids:
        paths[HOST, i] = paths[i, HOST] = 55 * 10**9
    idle = sum(g.total - g.used for g in gpus)
    each = int(idle * load / leases)
    made = []
    for k in range(leases):
        want = wish(each, dice)
        kept = want // 3 // CHUNK * CHUNK
        made.append(
            Lease(
                id=LeaseId(f"lease-{k:05d}"),
                pool=PoolName("bench"),
                gpu=ids[k % count],
                priority=dice.choice([0, 0, 0, 10, 20]),
                weight=dice.choice([1, 1, 1, 2]),
                guaranteed=CHUNK if k % 4 == 0 else 0,
                limit=2 * each,
                kept=kept,
                droppable=want - kept,
                asked_at=float(k % 50),
            )
        )
    return NodeState(gpus=gpus, paths=paths, leases=tuple(made))


def settled(state: NodeState, pools: list[PoolPolicy]) -> NodeState:
    """The state after some rounds in which nothing changes from outside."""
    for n in range(10):
        state = apply(state, plan(state, pools, 10.0 * n), 10.0 * n)
    return state


def event(state: NodeState, dice: random.Random) -> NodeState:
    """What makes an agent plan: mostly a lease that asks for more or less, else a lender that uses more or less.

    A lease asks for what it might have asked for at first, so that all together keep wanting the same.
    """
    if dice.random() < 0.7:
        leases = list(state.leases)
        k = dice.randrange(len(leases))
        lease = leases[k]
        leases[k] = replace(lease, droppable=wish(lease.limit // 2, dice) - lease.kept)
        return replace(state, leases=tuple(leases))
    gpus = list(state.gpus)
    k = dice.randrange(len(gpus))
    gpus[k] = replace(gpus[k], used=max(0, gpus[k].used + dice.choice([-2, -1, 1, 2]) * GIB // 4))
    return replace(state, gpus=tuple(gpus))


Took = tuple[float, float]
"""Milliseconds on the wall, and of this thread's processor time: the two differ where the machine is shared."""


def timed(state: NodeState, pools: list[PoolPolicy], now: float) -> tuple[Took, Plan]:
    wall, cpu = time.perf_counter(), time.thread_time()
    made = plan(state, pools, now)
    return ((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3), made


def measure(count: int, leases: int, load: float, repeat: int) -> dict[str, object]:
    """Plans after one event each, plans with nothing to do, and plans on lease objects never seen before."""
    dice = random.Random(7)
    state = server(count, leases, load, dice)
    pools = [pool([g.id for g in state.gpus])]
    state = settled(state, pools)
    busy: list[Took] = []
    idle: list[Took] = []
    fresh: list[Took] = []
    changes = waiting = 0
    for n in range(repeat):
        now = 1000.0 + n
        state = event(state, dice)
        took, made = timed(state, pools, now)
        busy.append(took)
        waiting = len(made.waiting)
        changes += len(made.moves) + len(made.drops) + len(made.grants)
        state = apply(state, made, now)
        idle.append(timed(state, pools, now)[0])
    for n in range(repeat):
        state = event(state, dice)
        remade = replace(state, leases=tuple([replace(lease) for lease in state.leases]))
        took, made = timed(remade, pools, 5000.0 + n)
        fresh.append(took)
        state = apply(state, made, 5000.0 + n)
    return {
        "gpus": count,
        "leases": leases,
        "wanted_of_idle": load,
        "places_held": sum(len(lease.held) for lease in state.leases),
        "waiting": waiting,
        "changes_a_plan": round(changes / repeat, 1),
        "after_an_event": figures(busy),
        "nothing_to_do": figures(idle),
        "all_plans": figures(busy + idle),
        "after_an_event_all_leases_new_objects": figures(fresh),
    }


def figures(took: list[Took]) -> dict[str, float]:
    wall, cpu = (quantiles(each, n=100) for each in zip(*took, strict=True))
    return {
        "p50_ms": round(wall[49], 3),
        "p99_ms": round(wall[98], 3),
        "cpu_p50_ms": round(cpu[49], 3),
        "cpu_p99_ms": round(cpu[98], 3),
    }


def rows(run: Mapping[str, Any], bound: float) -> list[Row]:
    """The figures of one server; the goal is for a plan after one event, in this thread's processor time."""
    name = f"{run['gpus']} GPUs, {run['leases']} leases that want {run['wanted_of_idle']:.0%} of what is idle: "
    event, idle, fresh = run["after_an_event"], run["nothing_to_do"], run["after_an_event_all_leases_new_objects"]
    return [
        at_most(bound, f"{name}plan after one event, p50", event["cpu_p50_ms"], "ms"),
        plain(f"{name}plan after one event, p99", event["cpu_p99_ms"], "ms"),
        plain(f"{name}plan with nothing to do, p50", idle["cpu_p50_ms"], "ms"),
        plain(f"{name}every lease a new object, p50", fresh["cpu_p50_ms"], "ms"),
    ]


def main() -> int:
    runs = [(8, 256, 0.8, 400, 1.0), (8, 256, 1.5, 400, 1.0), (16, 4096, 1.5, 30, 30.0)]
    found = [row for *of, bound in runs for row in rows(measure(*of), bound)]  # type: ignore[arg-type]
    return finish(record("plan", WHAT, found))


if __name__ == "__main__":
    sys.exit(main())
