"""Entitlements against an oracle that hands out single bytes and asks a maximum flow whether each one still fits."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from ema_core.ids import HOST
from ema_core.policy import lendable, plan
from ema_core.state import Lease, NodeState, PoolPolicy
from policy.nodes import gid, gpus, lease, mesh, node, pool, worlds


def fits(state: NodeState, pools: Sequence[PoolPolicy], amounts: dict[str, int]) -> bool:
    """Whether every lease's amount can be placed at once, found by augmenting paths, one byte each.

    The network: lease -> (pool, GPU), with the pool's limit there -> GPU, with its idle bytes.
    """
    by_name = {p.name: p for p in pools}
    apart = max(p.headroom for p in pools) + max(p.hysteresis for p in pools)
    idle = {g.id: max(0, g.total - g.reserved - g.used - apart) for g in state.gpus}
    capacity: dict[tuple[object, object], int] = {}
    for each in state.leases:
        capacity["source", each.id] = amounts[each.id]
        for g in state.gpus:
            if g.id != each.gpu and (g.id, each.gpu) in state.paths:
                slot = (each.pool, g.id)
                capacity[each.id, slot] = 10**9
                capacity[slot, g.id] = min(by_name[each.pool].max_per_gpu[g.id], 10**9)
    for name, size in idle.items():
        capacity[name, "sink"] = size
    after: dict[object, set[object]] = {}
    for a, b in capacity:
        after.setdefault(a, set()).add(b)
        after.setdefault(b, set()).add(a)

    def augment(at: object, seen: set[object]) -> bool:
        if at == "sink":
            return True
        seen.add(at)
        for to in after.get(at, ()):
            if to not in seen and capacity.get((at, to), 0) > 0 and augment(to, seen):
                capacity[at, to] -= 1
                capacity[to, at] = capacity.get((to, at), 0) + 1
                return True
        return False

    return all(augment("source", set()) for _ in range(sum(amounts.values())))


def oracle(state: NodeState, pools: Sequence[PoolPolicy]) -> dict[str, int]:
    """Byte by byte: guaranteed amounts, then the rest; high priorities first; the smallest (has + 1) / weight next."""
    has: dict[str, int] = {str(each.id): 0 for each in state.leases}

    def fill(tier: list[Lease], top: dict[str, int]) -> None:
        growing = [each for each in tier if has[each.id] < top[each.id]]
        while growing:
            each = min(growing, key=lambda x: (Fraction(has[x.id] + 1, x.weight), x.asked_at, x.id))
            more = {**has, str(each.id): has[each.id] + 1}
            if fits(state, pools, more):
                has.update(more)
            else:
                growing.remove(each)
            growing = [x for x in growing if has[x.id] < top[x.id]]

    wanted = {str(each.id): min(each.limit, each.droppable) for each in state.leases}
    for top in ({k: min(v, by.guaranteed) for (k, v), by in zip(wanted.items(), state.leases, strict=True)}, wanted):
        for priority in sorted({each.priority for each in state.leases}, reverse=True):
            fill([each for each in state.leases if each.priority == priority], top)
    return has


@st.composite
def small(draw: st.DrawFn) -> tuple[NodeState, list[PoolPolicy]]:
    """Whole bytes, nothing kept, no host memory: what is left is the sharing of GPUs."""
    state, pools = draw(worlds())
    leases = [
        replace(each, kept=0, droppable=min(8, each.droppable), guaranteed=min(3, each.guaranteed))
        for each in state.leases[:5]
    ]
    small_pools = [replace(p, chunk=1, host_lend=0, host_spill=0, max_per_gpu={
        k: draw(st.integers(0, 9)) for k in sorted(p.max_per_gpu)}) for p in pools]  # fmt: skip
    idle = [replace(g, total=draw(st.integers(0, 12))) for g in state.gpus]
    return replace(state, gpus=tuple(idle), leases=tuple(leases)), small_pools


@settings(max_examples=150, deadline=None)
@given(small())
def test_entitlements_are_weighted_max_min_within_priorities(world: tuple[NodeState, list[PoolPolicy]]) -> None:
    state, pools = world
    made = plan(state, pools, 0.0)
    assert made.entitlement == oracle(state, pools)


def test_equals_share_by_weight_and_the_older_gets_what_does_not_divide() -> None:
    state = node(
        gpus(0, 10, 0),
        lease("a", 0, 100, weight=1, asked_at=5.0),
        lease("b", 0, 100, weight=1, asked_at=1.0),
        lease("c", 2, 100, weight=2, asked_at=9.0),
    )
    assert plan(state, [pool(3)], 0.0).entitlement == {"a": 2, "b": 3, "c": 5}


def test_a_lower_priority_gets_only_what_the_higher_leaves() -> None:
    state = node(gpus(0, 10), lease("low", 0, 100), lease("high", 0, 7, priority=1))
    assert plan(state, [pool(2)], 0.0).entitlement == {"high": 7, "low": 3}


def test_a_guaranteed_amount_comes_before_a_higher_priority() -> None:
    state = node(gpus(0, 10), lease("low", 0, 100, guaranteed=4), lease("high", 0, 100, priority=1))
    assert plan(state, [pool(2)], 0.0).entitlement == {"high": 6, "low": 4}


def test_a_lease_is_entitled_to_what_it_can_reach_only() -> None:
    paths = mesh(3)
    del paths[gid(1), gid(0)]
    state = node(gpus(0, 50, 8), lease("a", 0, 100), lease("b", 1, 100), paths=paths)
    assert plan(state, [pool(3)], 0.0).entitlement == {"a": 4, "b": 4}


def test_its_own_gpu_lends_nothing_to_a_lease() -> None:
    state = node(gpus(50, 8), lease("a", 0, 100), lease("b", 1, 100))
    assert plan(state, [pool(2)], 0.0).entitlement == {"a": 8, "b": 50}


def test_host_memory_is_lent_to_whom_gpus_leave_short() -> None:
    state = node(gpus(0, 10), lease("a", 0, 12), lease("b", 0, 4))
    assert plan(state, [pool(2, host_lend=4)], 0.0).entitlement == {"a": 10, "b": 4}


def test_kept_bytes_are_lent_only_against_a_refuge_in_host_memory() -> None:
    state = node(gpus(0, 100), lease("a", 0, kept=30), lease("b", 0, 20, kept=30))
    made = plan(state, [pool(2, host_spill=8, host_lend=2)], 0.0)
    assert made.entitlement == {"a": 5, "b": 25}
    nothing = plan(state, [pool(2, host_spill=8, spill_to_host=False)], 0.0)
    assert nothing.entitlement == {"a": 0, "b": 20}


def test_two_pools_share_a_gpu_within_its_idle_bytes_and_their_own_limits() -> None:
    state = node(gpus(0, 10), lease("a", 0, 100, of="one"), lease("b", 0, 100, of="two"))
    made = plan(state, [pool(2, "one", 3), pool(2, "two", 100)], 0.0)
    assert made.entitlement == {"a": 3, "b": 7}


def test_what_is_lendable_is_counted_from_every_figure() -> None:
    gpu = replace(gpus(1000)[0], reserved=450, used=100)
    of = pool(1, headroom=50, chunk=64)
    assert lendable(gpu, of) == 384
    assert lendable(gpu, replace(of, max_per_gpu={gpu.id: 200})) == 192
    assert lendable(replace(gpu, used=2000), of) == 0
    assert lendable(replace(gpu, healthy=False), of) == 0
    assert lendable(replace(gpu, lends=False), of) == 0
    assert lendable(gpu, of, frozenset({gpu.id, HOST})) == 0
