"""Plans settle: nobody is moved to and fro."""

import random
from dataclasses import replace

import pytest

from ema_core.plan import Plan
from ema_core.policy import apply, plan
from ema_core.state import NodeState, PoolPolicy
from policy.nodes import by_id, gid, gpus, lease, node, on_gpus, pool


def moved(done: Plan) -> int:
    return sum(m.size for m in done.moves) + sum(d.size for d in done.drops)


def settle(state: NodeState, pools: list[PoolPolicy], now: float) -> tuple[NodeState, int]:
    """Let the inputs rest for a while; returns the state and in how many rounds there was something to do."""
    busy = 0
    for _ in range(12):
        done = plan(state, pools, now)
        busy += not done.empty
        state = apply(state, done, now)
        now += 2.5
    return state, busy


@pytest.mark.parametrize("kept", [False, True], ids=["droppable", "kept"])
@pytest.mark.parametrize("seed", range(2))
def test_two_borrowers_and_one_owner_for_a_thousand_rounds(seed: int, kept: bool) -> None:
    dice = random.Random(seed)
    of = [pool(3, hysteresis=4, headroom=2, host_spill=200, chunk=2)]
    state = node(gpus(0, 0, 100), lease("a", 0), lease("b", 1))
    now, changed, total = 0.0, 0, 0
    for _ in range(1000):
        leases, own = list(state.leases), state.gpus[2]
        if dice.random() < 0.7:
            k = dice.randrange(2)
            before = leases[k]
            want = dice.randrange(0, 80, 2)
            changed += abs(want - before.demand)
            leases[k] = replace(before, kept=want) if kept else replace(before, droppable=want)
        else:
            used = dice.randrange(0, 60)
            changed += abs(used - own.used)
            own = replace(own, used=used)
        state = replace(state, leases=tuple(leases), gpus=(*state.gpus[:2], own))
        done = plan(state, of, now)
        total += moved(done)
        state = apply(state, done, now)
        assert plan(state, of, now).empty
        now += 1.0
    # Every byte that moves was made to move by a byte of changed input; a promotion is the way back of a spill.
    assert 0 < total <= 2 * changed
    state, busy = settle(state, of, now)
    assert busy <= 4
    assert plan(state, of, now + 1000).empty


def test_a_lender_that_wavers_within_the_hysteresis_moves_nothing() -> None:
    of = [pool(2, hysteresis=8, headroom=4)]
    state = node(gpus(0, 100), lease("a", 0, 200))
    state = apply(state, plan(state, of, 0.0), 0.0)
    assert by_id(state)["a"].held_total == 88
    for n in range(100):
        wavering = replace(state.gpus[1], used=n % 9)
        done = plan(replace(state, gpus=(state.gpus[0], wavering)), of, float(n))
        assert done.empty


def test_a_fresh_borrower_is_safe_from_its_equals_until_min_hold_has_passed() -> None:
    of = [pool(3, min_hold=5.0)]
    state = node(gpus(0, 0, 10), lease("first", 0, 10))
    state = apply(state, plan(state, of, 0.0), 0.0)
    state = replace(state, leases=(*state.leases, lease("second", 1, 10, asked_at=1.0)))
    assert plan(state, of, 1.0).empty
    later = apply(state, plan(state, of, 5.0), 5.0)
    assert [on_gpus(each) for each in later.leases] == [5, 5]


def test_it_is_never_safe_from_the_lender_or_from_a_higher_priority() -> None:
    of = [pool(3, min_hold=5.0)]
    state = node(gpus(0, 0, 10), lease("first", 0, 10))
    state = apply(state, plan(state, of, 0.0), 0.0)
    own = replace(state, gpus=(*state.gpus[:2], replace(state.gpus[2], used=4)))
    assert moved(plan(own, of, 0.1)) == 4
    state = replace(state, leases=(*state.leases, lease("urgent", 1, 10, priority=1)))
    assert on_gpus(by_id(apply(state, plan(state, of, 0.1), 0.1))["urgent"]) == 10


def test_what_was_reclaimed_does_not_jump_back() -> None:
    of = [pool(2, min_hold=5.0)]
    state = node(gpus(0, 10), lease("a", 0, kept=10))
    state = apply(state, plan(state, of, 0.0), 0.0)
    busy = replace(state, gpus=(state.gpus[0], replace(state.gpus[1], used=6)))
    spilled = apply(busy, plan(busy, of, 10.0), 10.0)
    assert on_gpus(by_id(spilled)["a"]) == 4
    idle = replace(spilled, gpus=state.gpus)
    assert plan(idle, of, 14.9).empty
    back = apply(idle, plan(idle, of, 15.0), 15.0)
    assert by_id(back)["a"].held.keys() == {gid(1)}


def test_unless_it_is_below_its_guaranteed_amount() -> None:
    of = [pool(2, min_hold=5.0)]
    state = node(gpus(0, 10), lease("a", 0, kept=10, guaranteed=6))
    state = apply(state, plan(state, of, 0.0), 0.0)
    busy = replace(state, gpus=(state.gpus[0], replace(state.gpus[1], used=8)))
    spilled = apply(busy, plan(busy, of, 10.0), 10.0)
    idle = replace(spilled, gpus=state.gpus)
    assert on_gpus(by_id(apply(idle, plan(idle, of, 10.1), 10.1))["a"]) == 6
