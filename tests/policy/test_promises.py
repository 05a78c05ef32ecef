"""What every plan keeps, on nodes that hypothesis makes up and lets live through some rounds."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ema_core.ids import HOST
from ema_core.plan import Cause
from ema_core.policy import apply, lendable, plan
from ema_core.state import NodeState, PoolPolicy
from policy.nodes import lent, mesh, on_gpus, worlds

moderate = settings(max_examples=80, deadline=None)


def disturb(state: NodeState, dice: random.Random, *, kinds: int = 4) -> NodeState:
    """Another demand, another use of the lenders, a GPU that falls sick or is drained."""
    gpus, leases, draining = list(state.gpus), list(state.leases), state.draining
    what = dice.randrange(kinds)
    if what == 0 and leases:
        k = dice.randrange(len(leases))
        chunk = 2
        more = replace(
            leases[k], droppable=dice.randrange(12) * chunk, limit=max(leases[k].limit, leases[k].held_total)
        )
        if dice.random() < 0.3:
            more = replace(more, held={})
        leases[k] = more
    elif what == 1:
        k = dice.randrange(len(gpus))
        gpus[k] = replace(gpus[k], used=dice.randrange(gpus[k].total + 1))
    elif what == 2:
        k = dice.randrange(len(gpus))
        gpus[k] = replace(gpus[k], healthy=not gpus[k].healthy)
    elif what == 3:
        draining = frozenset() if draining else frozenset({dice.choice(gpus).id})
    return replace(state, gpus=tuple(gpus), leases=tuple(leases), draining=draining)


def lived(state: NodeState, pools: list[PoolPolicy], dice: random.Random, rounds: int) -> tuple[NodeState, float]:
    now = 100.0
    for _ in range(rounds):
        state = apply(state, plan(state, pools, now), now)
        state = disturb(state, dice)
        now += dice.choice([0.1, 3.0, 10.0])
    return state, now


History = tuple[tuple[NodeState, list[PoolPolicy]], random.Random, int]
histories = st.tuples(worlds(), st.randoms(use_true_random=False), st.integers(0, 6))


@moderate
@given(histories)
def test_planning_again_after_a_plan_was_carried_out_gives_nothing_to_do(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    first = plan(state, pools, now)
    second = plan(apply(state, first, now), pools, now)
    assert second.empty, (first, second)


@moderate
@given(histories)
def test_never_lends_what_is_not_there(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    done = plan(state, pools, now)
    after = apply(state, done, now)
    grown = {g.place for g in done.grants} | {m.target for m in done.moves}
    for gpu in state.gpus:
        if gpu.id not in grown:
            continue
        headroom, hysteresis = max(p.headroom for p in pools), max(p.hysteresis for p in pools)
        assert gpu.healthy
        assert gpu.id not in state.draining
        assert lent(after, gpu.id) <= gpu.total - gpu.reserved - gpu.used - headroom - hysteresis
        for pool in pools:
            assert lent(after, gpu.id, pool.name) <= lendable(gpu, pool)
    for before, lease in zip(state.leases, after.leases, strict=True):
        for place in lease.held:
            if place not in before.held:
                assert place != lease.gpu
                assert (place, lease.gpu) in state.paths
        if lease.held_total > before.held_total:
            assert lease.held_total <= lease.limit


@moderate
@given(histories)
def test_headroom_is_restored_wherever_a_victim_can_go(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    done = plan(state, pools, now)
    after = apply(state, done, now)
    late = {o.place for o in done.overdue if o.cause is not Cause.SHRINK}
    for gpu in state.gpus:
        room = gpu.total - gpu.reserved - gpu.used - max(p.headroom for p in pools)
        if not gpu.healthy or gpu.id in state.draining:
            room = 0
        if gpu.id not in late:
            assert lent(after, gpu.id) <= max(0, room)


@moderate
@given(histories)
def test_a_kept_byte_always_has_a_refuge(history: History) -> None:
    (state, pools), dice, rounds = history
    for _ in range(rounds + 1):
        state, now = lived(state, pools, dice, 1)
        done = plan(state, pools, now)
        after = apply(state, done, now)
        assert not done.overdue
        for pool in pools:
            mine = [lease for lease in after.leases if lease.pool == pool.name]
            kept = sum(h.kept for lease in mine for h in lease.held.values())
            room = pool.host_spill + pool.host_lend if pool.spill_to_host else 0
            assert kept <= room
            assert lent(after, HOST, pool.name) <= pool.host_spill + pool.host_lend
        state = after


@moderate
@given(histories)
def test_the_order_of_the_input_does_not_matter(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    gpus, leases, paths, other = list(state.gpus), list(state.leases), list(state.paths.items()), list(pools)
    for each in (gpus, leases, paths, other):
        dice.shuffle(each)
    shuffled = [replace(x, held=dict(dice.sample(list(x.held.items()), len(x.held)))) for x in leases]
    mixed = replace(state, gpus=tuple(gpus), leases=tuple(shuffled), paths=dict(paths))
    assert plan(mixed, other, now) == plan(state, pools, now)


@moderate
@given(histories)
def test_everything_is_in_whole_chunks(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    done = plan(state, pools, now)
    chunk = {lease.id: pool.chunk for lease in state.leases for pool in pools if pool.name == lease.pool}
    changes = [(x.lease, x.size) for each in (done.moves, done.drops, done.grants) for x in each]
    for lease_id, size in changes:
        assert size > 0
        assert size % chunk[lease_id] == 0


@moderate
@given(histories)
def test_nobody_gets_gpu_memory_beyond_his_entitlement(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    done = plan(state, pools, now)
    after = apply(state, done, now)
    assert done.entitlement is not None
    granted = {g.lease for g in done.grants}
    for lease in after.leases:
        assert done.entitlement[lease.id] <= min(lease.limit, -(-lease.demand // 2) * 2)
        if lease.id in granted:
            assert lease.held_total <= done.entitlement[lease.id]
            assert on_gpus(lease) <= done.entitlement[lease.id]


@moderate
@given(histories)
def test_on_a_full_mesh_everybody_has_his_entitlement_as_soon_as_nothing_protects_others(history: History) -> None:
    (state, pools), dice, rounds = history
    of = replace(pools[0], min_hold=0.0, host_lend=0, spill_to_peer=True)
    leases = tuple(replace(x, kept=0, pool=of.name) for x in state.leases)
    state = replace(state, leases=leases, paths=mesh(len(state.gpus)))
    state, now = lived(state, [of], dice, rounds)
    done = plan(state, [of], now)
    assert done.entitlement is not None
    for lease in apply(state, done, now).leases:
        assert on_gpus(lease) >= done.entitlement[lease.id]


@moderate
@given(histories)
def test_nobody_waits_for_what_a_lower_priority_has_and_he_could_reach(history: History) -> None:
    (state, pools), dice, rounds = history
    state, now = lived(state, pools, dice, rounds)
    done = plan(state, pools, now)
    after = apply(state, done, now)
    share = done.entitlement or {}
    hold = {p.name: p.min_hold for p in pools}
    for high in after.leases:
        rested = now - high.reclaimed_at >= hold[high.pool]
        if not rested or high.kept or high.held_total >= share[high.id]:
            continue
        for low in after.leases:
            if low.priority < high.priority and low.pool == high.pool and on_gpus(low) > share[low.id]:
                reached = {g for g in low.held if (g, high.gpu) in after.paths and g != HOST}
                assert not reached, (high, low)
