"""How long `plan` takes: two servers in steady state, full, with a mix of holdings, and a few leases that change.

Run `python bench/plan.py`; it prints the figures and keeps them in `bench/results/plan.json`.
"""

import json
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles

from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName
from ema_core.policy import apply, plan
from ema_core.state import Gpu, Lease, NodeState, PoolPolicy

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


def server(count: int, leases: int, dice: random.Random) -> NodeState:
    """A full mesh whose leases want half as much again as there is to lend, in three tiers, a third of it kept."""
    ids = [GpuId(Place(f"GPU-{k:02d}")) for k in range(count)]
    gpus = tuple(Gpu(i, 141 * GIB, GIB // 2, dice.randrange(40, 100) * GIB) for i in ids)
    paths: dict[tuple[Place, Place], int] = {(a, b): 400 * 10**9 for a in ids for b in ids if a != b}
    for i in ids:
        paths[HOST, i] = paths[i, HOST] = 55 * 10**9
    idle = sum(g.total - g.used for g in gpus)
    each = idle * 3 // (2 * leases)
    made = []
    for k in range(leases):
        want = dice.randrange(each // 2, each * 3 // 2) // CHUNK * CHUNK
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


def rounds(state: NodeState, pools: list[PoolPolicy], dice: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Seconds of each plan, and how much it asked for, while 1 % of the leases and one lender's use change."""
    now = 0.0
    for _ in range(10):
        state = apply(state, plan(state, pools, now), now)
        now += 10
    for _ in range(count):
        leases, gpus = list(state.leases), list(state.gpus)
        for k in dice.sample(range(len(leases)), max(1, len(leases) // 100)):
            lease = leases[k]
            leases[k] = replace(lease, droppable=dice.randrange(0, lease.limit) // CHUNK * CHUNK)
        k = dice.randrange(len(gpus))
        gpus[k] = replace(gpus[k], used=max(0, gpus[k].used + dice.choice([-1, 0, 1]) * GIB // 4))
        state = replace(state, gpus=tuple(gpus), leases=tuple(leases))
        start = time.perf_counter()
        made = plan(state, pools, now)
        took = time.perf_counter() - start
        yield took, len(made.moves) + len(made.drops) + len(made.grants)
        state = apply(state, made, now)
        now += 1


def measure(count: int, leases: int, repeat: int) -> dict[str, float | int]:
    dice = random.Random(7)
    state = server(count, leases, dice)
    seen = list(rounds(state, [pool([g.id for g in state.gpus])], dice, repeat))
    cuts = quantiles([took for took, _ in seen], n=100)
    return {
        "gpus": count,
        "leases": leases,
        "plans": repeat,
        "p50_ms": round(cuts[49] * 1e3, 3),
        "p99_ms": round(cuts[98] * 1e3, 3),
        "changes_a_plan": round(sum(changes for _, changes in seen) / repeat, 1),
    }


def main() -> None:
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}, {cpu()}",
        "python": platform.python_version(),
        "runs": [measure(8, 256, 1000), measure(16, 4096, 60)],
    }
    print(json.dumps(report, indent=2))
    if "--keep" in sys.argv or len(sys.argv) == 1:
        target = Path(__file__).parent / "results" / "plan.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(report, indent=2) + "\n")


def cpu() -> str:
    """The processor's name, where Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
