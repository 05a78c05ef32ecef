"""Nodes, pools and leases for tests of the policy, in small numbers instead of bytes."""

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName
from ema_core.state import Gpu, Holding, Lease, NodeState, PoolPolicy

NEVER = float("-inf")


def gid(k: int) -> GpuId:
    return GpuId(Place(f"GPU-{k}"))


def gpus(*idle: int, used: int = 0) -> tuple[Gpu, ...]:
    """One GPU for each number, with that many idle bytes."""
    return tuple(Gpu(gid(k), total=size + used, reserved=0, used=used) for k, size in enumerate(idle))


def mesh(n: int, rate: int = 400, host: int = 50) -> dict[tuple[Place, Place], int]:
    """Everybody reaches everybody, and host memory."""
    ids = [gid(k) for k in range(n)]
    paths: dict[tuple[Place, Place], int] = {(a, b): rate for a in ids for b in ids if a != b}
    for each in ids:
        paths[HOST, each] = paths[each, HOST] = host
    return paths


def pool(
    n: int,
    name: str = "pool",
    most: int = 10**6,
    *,
    headroom: int = 0,
    hysteresis: int = 0,
    chunk: int = 1,
    host_spill: int = 10**6,
    host_lend: int = 0,
    min_hold: float = 5.0,
    spill_to_peer: bool = True,
    spill_to_host: bool = True,
    spill_to_drop: bool = True,
) -> PoolPolicy:
    ids = [gid(k) for k in range(n)]
    return PoolPolicy(
        name=PoolName(name),
        gpus=frozenset(ids),
        max_per_gpu=dict.fromkeys(ids, most),
        headroom=headroom,
        hysteresis=hysteresis,
        chunk=chunk,
        host_spill=host_spill,
        host_lend=host_lend,
        spill_to_peer=spill_to_peer,
        spill_to_host=spill_to_host,
        spill_to_drop=spill_to_drop,
        min_hold=min_hold,
    )


def lease(
    name: str,
    gpu: int,
    droppable: int = 0,
    *,
    kept: int = 0,
    limit: int = 10**6,
    held: Mapping[int | Place, Holding] | None = None,
    of: str = "pool",
    priority: int = 0,
    weight: int = 1,
    guaranteed: int = 0,
    asked_at: float = 0.0,
    granted_at: float = NEVER,
    reclaimed_at: float = NEVER,
) -> Lease:
    return Lease(
        id=LeaseId(name),
        pool=PoolName(of),
        gpu=gid(gpu),
        priority=priority,
        weight=weight,
        guaranteed=guaranteed,
        limit=limit,
        kept=kept,
        droppable=droppable,
        asked_at=asked_at,
        granted_at=granted_at,
        reclaimed_at=reclaimed_at,
        held={gid(k) if isinstance(k, int) else k: h for k, h in (held or {}).items()},
    )


def node(of: Sequence[Gpu], *leases: Lease, paths: Mapping[tuple[Place, Place], int] | None = None) -> NodeState:
    return NodeState(gpus=tuple(of), paths=mesh(len(of)) if paths is None else paths, leases=tuple(leases))


def lent(state: NodeState, gpu: Place, of: str | None = None) -> int:
    """Bytes that leases (of one pool) hold at a place."""
    return sum(each.held[gpu].total for each in state.leases if gpu in each.held and of in (None, each.pool))


def on_gpus(each: Lease) -> int:
    return sum(h.total for place, h in each.held.items() if place != HOST)


def by_id(state: NodeState) -> dict[str, Lease]:
    return {each.id: each for each in state.leases}


sizes = st.integers(0, 12)


@st.composite
def requests(draw: st.DrawFn, n: int, name: str, pools: Sequence[PoolPolicy]) -> Lease:
    """A lease that holds nothing yet."""
    of = draw(st.sampled_from(pools))
    chunk = of.chunk
    kept, droppable = draw(sizes) * chunk, draw(sizes) * chunk
    return lease(
        name,
        draw(st.integers(0, n - 1)),
        droppable,
        kept=kept if draw(st.booleans()) else 0,
        of=of.name,
        limit=draw(st.integers(0, 24)) * chunk,
        priority=draw(st.integers(0, 2)),
        weight=draw(st.integers(1, 3)),
        guaranteed=draw(st.sampled_from([0, 0, 2, 5])) * chunk,
        asked_at=draw(st.sampled_from([0.0, 1.0])),
    )


@st.composite
def worlds(draw: st.DrawFn, most_pools: int = 2) -> tuple[NodeState, list[PoolPolicy]]:
    """A node with leases that hold nothing yet, and its pools."""
    n = draw(st.integers(2, 4))
    chunk = draw(st.sampled_from([1, 2]))
    pools = [
        pool(
            n,
            f"pool-{k}",
            draw(st.integers(4, 40)),
            headroom=draw(st.integers(0, 3)),
            hysteresis=draw(st.sampled_from([0, 2])),
            chunk=chunk,
            host_spill=draw(st.integers(0, 20)) * chunk,
            host_lend=draw(st.integers(0, 8)) * chunk,
            min_hold=draw(st.sampled_from([0.0, 5.0])),
            spill_to_peer=draw(st.booleans()),
            spill_to_host=draw(st.sampled_from([True, True, False])),
        )
        for k in range(draw(st.integers(1, most_pools)))
    ]
    paths = mesh(n)
    for a in range(n):
        for b in range(n):
            if a != b and draw(st.integers(0, 5)) == 0:
                del paths[gid(a), gid(b)]
            elif a != b and draw(st.integers(0, 4)) == 0:
                paths[gid(a), gid(b)] = 100
    leases = [draw(requests(n, f"lease-{k}", pools)) for k in range(draw(st.integers(0, 7)))]
    idle = [draw(st.integers(0, 30)) for _ in range(n)]
    return node(gpus(*idle), *leases, paths=paths), pools
