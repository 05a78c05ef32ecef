"""What the policy does, scene by scene."""

from dataclasses import replace
from typing import Any

import pytest

from ema_core.ids import HOST, LeaseId, Place
from ema_core.plan import Cause, Drop, Grant, Move, Overdue, Waiting
from ema_core.policy import apply, plan
from ema_core.state import Gpu, Holding
from policy.nodes import by_id, gid, gpus, lease, lent, mesh, node, on_gpus, pool

GIB = 1 << 30


def test_a_lone_borrower_gets_what_it_asks_for_spread_over_idle_neighbours() -> None:
    state = node(gpus(0, 10, 10, 10), lease("a", 0, kept=12))
    done = plan(state, [pool(4)], 0.0)
    assert done.grants == tuple(Grant(LeaseId("a"), gid(k), 4, droppable=False) for k in (1, 2, 3))
    assert (done.moves, done.drops, done.waiting) == ((), (), ())


def test_the_fastest_path_comes_first() -> None:
    paths = mesh(3)
    paths[gid(1), gid(0)] = 900
    state = node(gpus(0, 10, 50), lease("a", 0, 14), paths=paths)
    done = plan(state, [pool(3)], 0.0)
    assert done.grants == (
        Grant(LeaseId("a"), gid(1), 10, droppable=True),
        Grant(LeaseId("a"), gid(2), 4, droppable=True),
    )


def test_what_sits_well_stays() -> None:
    state = node(gpus(0, 20, 20), lease("a", 0, 10, held={1: Holding(droppable=9)}))
    done = plan(state, [pool(3)], 0.0)
    assert done.moves == ()
    assert done.grants == (Grant(LeaseId("a"), gid(2), 1, droppable=True),)


def test_sizes_are_per_device_forty_gib_fit_the_large_gpu_only() -> None:
    small, large, own = (Gpu(gid(k), size * GIB, 0, 0) for k, size in enumerate((16, 80, 80)))
    state = node((small, large, own), lease("a", 2, kept=40 * GIB, limit=40 * GIB))
    of = pool(3, most=80 * GIB, chunk=GIB, host_spill=100 * GIB)
    done = plan(state, [of], 0.0)
    assert sum(g.size for g in done.grants) == 40 * GIB
    assert {g.place: g.size for g in done.grants}[gid(1)] >= 24 * GIB
    assert lent(apply(state, done, 0.0), gid(0)) <= 16 * GIB


def test_the_lenders_own_demand_beats_every_borrower_lowest_priority_first() -> None:
    state = node(
        gpus(0, 10),
        lease("low", 0, 5, held={1: Holding(droppable=5)}, granted_at=100.0),
        lease("high", 0, 5, priority=1, held={1: Holding(droppable=5)}, granted_at=100.0),
    )
    busy = replace(state, gpus=(*gpus(0, 10)[:1], replace(state.gpus[1], used=7)))
    done = plan(busy, [pool(2, host_spill=0)], 100.0)
    assert done.drops == (
        Drop(LeaseId("low"), gid(1), 5, Cause.HEADROOM),
        Drop(LeaseId("high"), gid(1), 2, Cause.HEADROOM),
    )


def test_among_equals_who_is_furthest_above_its_entitlement_loses_first_then_the_coldest() -> None:
    def at(seconds: float, size: int) -> dict[int | Place, Holding]:
        return {1: Holding(droppable=size, last_used=seconds)}

    state = node(
        gpus(0, 9),
        lease("a", 0, 5, held=at(3.0, 4)),
        lease("b", 0, 5, held=at(1.0, 4)),
        lease("c", 0, 5, held=at(2.0, 4)),
    )
    done = plan(state, [pool(2, host_spill=0)], 100.0)
    assert done.drops == tuple(Drop(LeaseId(x), gid(1), 1, Cause.HEADROOM) for x in ("b", "c", "a"))


def test_clean_bytes_are_taken_before_dirty_ones() -> None:
    state = node(gpus(0, 6), lease("a", 0, kept=10, held={1: Holding(clean=4, dirty=6)}))
    done = plan(state, [pool(2, host_spill=10)], 0.0)
    assert done.moves == (Move(LeaseId("a"), gid(1), HOST, 4, droppable=False, cause=Cause.HEADROOM),)
    assert by_id(apply(state, done, 0.0))["a"].held[gid(1)] == Holding(dirty=6)


def test_a_victim_goes_to_another_lender_then_to_host_memory_then_it_is_dropped() -> None:
    state = node(gpus(0, 0, 3), lease("a", 0, 10, held={1: Holding(droppable=10)}))
    done = plan(state, [pool(3, host_spill=4)], 0.0)
    assert done.moves == (
        Move(LeaseId("a"), gid(1), gid(2), 3, droppable=True, cause=Cause.HEADROOM),
        Move(LeaseId("a"), gid(1), HOST, 4, droppable=True, cause=Cause.HEADROOM),
    )
    assert done.drops == (Drop(LeaseId("a"), gid(1), 3, Cause.HEADROOM),)


@pytest.mark.parametrize("closed", ["spill_to_peer", "spill_to_host", "spill_to_drop"])
def test_the_pool_says_which_ways_are_open(closed: str) -> None:
    off: dict[str, Any] = {closed: False}
    state = node(gpus(0, 0, 3), lease("a", 0, 10, held={1: Holding(droppable=10)}))
    done = plan(state, [replace(pool(3, host_spill=4), **off)], 0.0)
    ways = {"spill_to_peer": bool({m.target for m in done.moves} & {gid(2)})}
    ways["spill_to_host"] = HOST in {m.target for m in done.moves}
    ways["spill_to_drop"] = bool(done.drops)
    assert ways == {way: way != closed for way in ways}
    assert bool(done.overdue) == (closed == "spill_to_drop")


def test_bytes_with_nowhere_to_go_are_overdue() -> None:
    state = node(gpus(0, 4), lease("a", 0, kept=10, held={1: Holding(dirty=10)}))
    done = plan(state, [pool(2, host_spill=0)], 0.0)
    assert done.empty
    assert done.overdue == (Overdue(LeaseId("a"), gid(1), 6, Cause.HEADROOM),)


@pytest.mark.parametrize(
    ("change", "cause"),
    [({"healthy": False}, Cause.HEALTH), ({"lends": False}, Cause.HEADROOM)],
    ids=["sick", "newly assigned"],
)
def test_a_gpu_that_lends_no_more_is_emptied(change: dict[str, Any], cause: Cause) -> None:
    state = node(gpus(0, 10, 10), lease("a", 0, kept=6, held={1: Holding(dirty=6)}))
    state = replace(state, gpus=(state.gpus[0], replace(state.gpus[1], **change), state.gpus[2]))
    done = plan(state, [pool(3)], 0.0)
    assert done.moves == (Move(LeaseId("a"), gid(1), gid(2), 6, droppable=False, cause=cause),)


def test_a_drained_gpu_is_emptied_and_host_memory_can_be_drained_too() -> None:
    state = node(gpus(0, 10, 10), lease("a", 0, kept=6, held={1: Holding(dirty=4), HOST: Holding(dirty=2)}))
    drained = replace(state, draining=frozenset({gid(1)}))
    after = apply(drained, plan(drained, [pool(3)], 0.0), 0.0)
    assert lent(after, gid(1)) == 0
    drained = replace(state, draining=frozenset({HOST}))
    done = plan(drained, [pool(3)], 0.0)
    assert done.moves == (Move(LeaseId("a"), HOST, gid(2), 2, droppable=False, cause=Cause.DRAIN),)


def test_bytes_behind_a_path_that_was_barred_move_away() -> None:
    paths = mesh(3)
    del paths[gid(1), gid(0)]
    state = node(gpus(0, 10, 10), lease("a", 0, kept=6, held={1: Holding(dirty=6)}), paths=paths)
    done = plan(state, [pool(3)], 0.0)
    assert done.moves == (Move(LeaseId("a"), gid(1), gid(2), 6, droppable=False, cause=Cause.HEALTH),)


def test_bytes_on_a_gpu_that_is_not_listed_any_more_move_away_or_are_overdue() -> None:
    state = node(gpus(0, 1), lease("a", 0, kept=2, held={7: Holding(dirty=2)}))
    done = plan(state, [pool(2, host_spill=0)], 0.0)
    assert done.moves == (Move(LeaseId("a"), gid(7), gid(1), 1, droppable=False, cause=Cause.HEALTH),)
    assert done.overdue == (Overdue(LeaseId("a"), gid(7), 1, Cause.HEALTH),)


def test_who_cannot_give_way_does_not_shield_who_can() -> None:
    state = node(
        gpus(0, 4),
        lease("stuck", 0, kept=4, held={1: Holding(dirty=4)}),
        lease("loose", 0, 4, priority=1, held={1: Holding(droppable=4)}),
    )
    done = plan(state, [pool(2, host_spill=0)], 0.0)
    assert done.drops == (Drop(LeaseId("loose"), gid(1), 4, Cause.HEADROOM),)
    assert done.overdue == ()


def test_a_lower_pool_limit_takes_from_that_pool_only() -> None:
    state = node(
        gpus(0, 20),
        lease("a", 0, 8, of="one", held={1: Holding(droppable=8)}),
        lease("b", 0, 8, of="two", held={1: Holding(droppable=8)}),
    )
    done = plan(state, [pool(2, "one", 5, host_spill=0), pool(2, "two", 20, host_spill=0)], 0.0)
    assert done.drops == (Drop(LeaseId("a"), gid(1), 3, Cause.LIMIT),)


def test_a_lease_over_its_limit_loses_droppable_bytes_and_owes_the_kept_ones() -> None:
    holding = Holding(dirty=6, droppable=4)
    state = node(gpus(0, 20), lease("a", 0, 4, kept=6, limit=4, held={1: holding}))
    done = plan(state, [pool(2)], 0.0)
    assert done.drops == (Drop(LeaseId("a"), gid(1), 4, Cause.SHRINK),)
    assert done.overdue == (Overdue(LeaseId("a"), gid(1), 2, Cause.SHRINK),)


def test_a_higher_priority_takes_what_it_is_entitled_to() -> None:
    state = node(
        gpus(0, 0, 10),
        lease("low", 0, kept=10, held={2: Holding(dirty=10)}, granted_at=99.0),
        lease("high", 1, kept=7, priority=5),
    )
    done = plan(state, [pool(3)], 100.0)
    assert done.moves == (Move(LeaseId("low"), gid(2), HOST, 7, droppable=False, cause=Cause.PRIORITY),)
    assert done.grants == (Grant(LeaseId("high"), gid(2), 7, droppable=False),)


def test_an_equal_takes_only_what_is_above_the_others_entitlement() -> None:
    state = node(gpus(0, 0, 10), lease("old", 0, 10, held={2: Holding(droppable=10)}), lease("new", 1, 10))
    done = plan(state, [pool(3, host_spill=0)], 100.0)
    assert done.drops == (Drop(LeaseId("old"), gid(2), 5, Cause.FAIRNESS),)
    assert done.grants == (Grant(LeaseId("new"), gid(2), 5, droppable=True),)


def test_a_neighbour_moves_over_where_the_only_free_room_is_on_the_takers_own_gpu() -> None:
    state = node(gpus(5, 5, 0), lease("far", 2, 5, held={1: Holding(droppable=5)}), lease("near", 0, 5))
    done = plan(state, [pool(3)], 100.0)
    assert done.moves == (Move(LeaseId("far"), gid(1), gid(0), 5, droppable=True, cause=Cause.FAIRNESS),)
    assert done.grants == (Grant(LeaseId("near"), gid(1), 5, droppable=True),)


def test_host_memory_lends_last_and_bytes_come_back_when_gpus_have_room() -> None:
    of = [pool(2, host_lend=5)]
    state = node(gpus(0, 4), lease("a", 0, kept=7))
    done = plan(state, of, 0.0)
    assert done.grants == (
        Grant(LeaseId("a"), gid(1), 4, droppable=False),
        Grant(LeaseId("a"), HOST, 3, droppable=False),
    )
    roomy = replace(apply(state, done, 0.0), gpus=gpus(0, 9))
    back = plan(roomy, of, 1.0)
    assert back.moves == (Move(LeaseId("a"), HOST, gid(1), 3, droppable=False, cause=Cause.PROMOTE),)


def test_droppable_bytes_make_way_in_host_memory_for_kept_ones() -> None:
    state = node(
        gpus(0, 4),
        lease("cache", 0, 6, held={HOST: Holding(droppable=6)}, reclaimed_at=99.0),
        lease("work", 0, kept=4, priority=1),
    )
    done = plan(state, [pool(2, host_spill=6)], 100.0)
    assert sum(g.size for g in done.grants if g.lease == "work") == 4
    assert sum(d.size for d in done.drops) == 4


def test_when_all_is_full_the_queue_is_by_priority_then_age_then_name() -> None:
    held: dict[int | Place, Holding] = {1: Holding(droppable=10)}
    state = node(
        gpus(0, 10),
        lease("holder", 0, 10, priority=9, held=held),
        lease("b", 0, 5, asked_at=2.0),
        lease("a", 0, 4, asked_at=2.0),
        lease("older", 0, 3, asked_at=1.0),
        lease("urgent", 0, 2, asked_at=3.0, priority=1),
    )
    done = plan(state, [pool(2)], 10.0)
    assert done.empty
    assert done.waiting == (
        Waiting(LeaseId("urgent"), 2, 0),
        Waiting(LeaseId("older"), 3, 1),
        Waiting(LeaseId("a"), 4, 2),
        Waiting(LeaseId("b"), 5, 3),
    )


def test_a_demand_beyond_the_limit_does_not_wait_for_room() -> None:
    state = node(gpus(0, 10), lease("a", 0, 9, limit=4))
    done = plan(state, [pool(2)], 0.0)
    assert done.waiting == ()
    assert sum(g.size for g in done.grants) == 4


def test_a_lease_whose_pool_is_gone_gets_nothing_and_gives_back_what_it_can() -> None:
    state = node(gpus(0, 10), lease("a", 0, 4, kept=4, of="gone", held={1: Holding(dirty=4, droppable=4)}))
    done = plan(state, [pool(2)], 0.0)
    assert done.drops == (Drop(LeaseId("a"), gid(1), 4, Cause.LIMIT),)
    assert done.overdue == (Overdue(LeaseId("a"), gid(1), 4, Cause.LIMIT),)
    assert done.entitlement == {"a": 0}


def test_bytes_on_a_gpu_that_is_gone_leave_it_though_paths_still_name_it() -> None:
    paths = mesh(3)
    del paths[gid(0), gid(2)]
    state = node(gpus(0, 10), lease("a", 0, 4, held={2: Holding(droppable=4)}), paths=paths)
    done = plan(state, [pool(2)], 0.0)
    assert done.moves == (Move(LeaseId("a"), gid(2), gid(1), 4, droppable=True, cause=Cause.HEALTH),)


def test_borrowers_on_gpus_that_the_node_does_not_have_are_not_taken_for_each_other() -> None:
    stuck = lease("a", 8, 4, held={0: Holding(droppable=4)})
    state = node(gpus(10), stuck, lease("b", 9, 4), paths={(gid(0), gid(9)): 400})
    done = plan(state, [pool(1)], 0.0)
    assert done.grants == (Grant(LeaseId("b"), gid(0), 4, droppable=True),)


def test_a_limit_smaller_than_a_chunk_lends_nothing() -> None:
    state = node(gpus(0, 100), lease("a", 0, 50))
    assert plan(state, [pool(2, most=1, chunk=4)], 0.0).empty


@pytest.mark.parametrize("field", ["guaranteed", "limit", "kept", "droppable"])
def test_a_negative_amount_of_a_lease_is_refused(field: str) -> None:
    negative: dict[str, Any] = {field: -1}
    with pytest.raises(ValueError, match=rf"lease a: {field} is -1; it must be 0 or more"):
        replace(lease("a", 0), **negative)


def test_a_negative_amount_never_makes_credit() -> None:
    with pytest.raises(ValueError, match=r"pool pool: headroom is -1"):
        pool(2, headroom=-1)
    with pytest.raises(ValueError, match=r"pool pool: max_per_gpu\[GPU-0\] is -5"):
        pool(1, most=-5)
    with pytest.raises(ValueError, match=r"pool pool: chunk is 0; it must be 1 or more"):
        pool(2, chunk=0)
    with pytest.raises(ValueError, match=r"holding: dirty is -1"):
        Holding(dirty=-1)
    with pytest.raises(ValueError, match=r"gpu GPU-0: used is -1"):
        Gpu(gid(0), 1, 0, -1)
    with pytest.raises(ValueError, match=r"lease a: weight is 0; it must be 1 or more"):
        lease("a", 0, weight=0)


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="pools: names must differ"):
        plan(node(gpus(1)), [pool(1), pool(1)], 0.0)
    with pytest.raises(ValueError, match="leases: ids must differ"):
        plan(node(gpus(1, 1), lease("a", 0), lease("a", 1)), [pool(2)], 0.0)
    with pytest.raises(ValueError, match="gpus: ids must differ"):
        plan(node((*gpus(1), *gpus(1))), [pool(1)], 0.0)


def test_a_plan_that_takes_what_is_not_there_is_refused() -> None:
    state = node(gpus(0, 10), lease("a", 0, kept=4))
    after = apply(state, plan(state, [pool(2)], 0.0), 0.0)
    stale = plan(replace(after, draining=frozenset({gid(1)})), [pool(2)], 0.0)
    with pytest.raises(ValueError, match=r"lease a holds 4 kept bytes too few at GPU-1"):
        apply(state, stale, 0.0)
    assert on_gpus(by_id(after)["a"]) == 4


def test_the_worked_example_of_the_policys_page() -> None:
    of = [pool(3, host_spill=8)]
    idle = gpus(0, 0, 10)
    state = node(idle, lease("train", 0, kept=10))
    state = apply(state, plan(state, of, 0.0), 0.0)
    assert by_id(state)["train"].held_total == 8

    state = replace(state, leases=(*state.leases, lease("serve", 1, 6, priority=5)))
    done = plan(state, of, 10.0)
    assert done.entitlement == {"train": 4, "serve": 6}
    assert done.moves == (Move(LeaseId("train"), gid(2), HOST, 4, droppable=False, cause=Cause.PRIORITY),)
    state = apply(state, done, 10.0)

    state = replace(state, gpus=(*idle[:2], replace(idle[2], used=5)))
    done = plan(state, of, 20.0)
    assert done.entitlement == {"train": 0, "serve": 5}
    assert done.moves == (Move(LeaseId("train"), gid(2), HOST, 4, droppable=False, cause=Cause.HEADROOM),)
    assert done.drops == (Drop(LeaseId("serve"), gid(2), 1, Cause.HEADROOM),)
    state = replace(apply(state, done, 20.0), gpus=idle)

    assert plan(state, of, 24.0).empty
    after = by_id(apply(state, plan(state, of, 25.0), 25.0))
    assert [on_gpus(after["serve"]), on_gpus(after["train"])] == [6, 4]
