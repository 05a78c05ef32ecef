"""What spilling is made of: the plan, which is arithmetic, and what a GPU's stream does when its agent is gone."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch

import ema
from ema.torch.spill_guard import Guard, Mask
from ema.torch.spill_plan import Learnt, copies, pieces, places, rounded, slot_size, spread
from ema_core import wire
from ema_core.ids import LeaseId
from nodes import Node, until

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(SIZES, st.floats(0.0, 1.0), st.data())
def test_what_is_chosen_is_spread_evenly(sizes: list[int], part: float, data: st.DataObject) -> None:
    items = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True).map(sorted))
    total = sum(sizes[i] for i in items)
    chosen = spread(sizes, items, int(total * part))
    assert chosen == sorted(set(chosen) & set(items))
    assert sum(sizes[i] for i in chosen) <= total * part
    if part == 1.0:
        assert chosen == items
    for end in range(len(items)):
        seen = items[: end + 1]
        assert sum(sizes[i] for i in chosen if i in seen) <= part * sum(sizes[i] for i in seen)


@given(SIZES, st.integers(1, 5), st.integers(64, 2000), st.integers(64, 3000))
def test_pieces_are_all_bytes_once(sizes: list[int], slots: int, slot_bytes: int, chunk: int) -> None:
    items = list(range(len(sizes)))
    at, size = places(sizes, items)
    cut = pieces(sizes, items, at, slots, slot_bytes)
    assert [p.slot for p in cut] == [n % slots for n in range(len(cut))]
    spans = sorted((p.at, p.at + p.size) for p in cut)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= size
    for i in items:
        of = [p for p in cut if p.item == i]
        assert [p.start for p in of] == list(range(0, sizes[i], slot_bytes))
        assert sum(p.size for p in of) == sizes[i]
        assert all(0 < p.size <= slot_bytes and p.at - p.start == at[i] for p in of)
    touched = sum(len({b // chunk for b in range(p.at, p.at + p.size)}) for p in cut)
    assert copies(cut, chunk) == touched


def test_what_may_be_spilled() -> None:
    learnt = Learnt(
        sizes=(10, 20, 30, 40, 50),
        order=(4, 3, 1, 0),
        lasting=frozenset({3}),
        until={4: 2, 3: 1, 1: 4},
        forward=2.0,
        backward=1.0,
    )
    assert learnt.spillable(0) == [0, 1, 4]  # the third was never used, the fourth outlives the step
    assert learnt.spillable(1) == [0, 1]  # the fifth is what backward uses first
    assert learnt.spillable(50) == [0, 1]
    assert learnt.spillable(51) == [0]
    assert learnt.spillable(1000) == []
    assert learnt.hidden(100) == 90
    assert learnt.alike(Learnt(learnt.sizes, learnt.order, frozenset(), {}))
    assert not learnt.alike(Learnt(learnt.sizes, (4, 3, 0, 1), frozenset(), {}))
    assert not learnt.alike(None)


def test_what_may_stay_in_its_slot() -> None:
    sizes, order = (1,) * 6, (5, 4, 3, 2, 1, 0)
    learnt = Learnt(sizes, order, frozenset(), until={5: 1, 4: 3, 3: 3, 2: 4, 0: 6})
    back = [4, 3, 2, 1, 0]  # the item used first is local
    assert learnt.passing(back, ring=2) == {3, 2, 0}  # the first of them is used beyond the next, one to the end
    assert learnt.passing(back, ring=4) == {4, 3, 2, 0}
    longer = Learnt(sizes, order, frozenset({1}), until={5: 1, 4: 2, 3: 5, 2: 5})
    both = learnt.joined(longer)
    assert both.until == {5: 1, 4: 3, 3: 5, 2: 5}
    assert both.lasting == {1}


def test_slots_are_a_small_part_of_what_goes_through_them() -> None:
    assert slot_size([1000] * 4, 4, 512) == 512
    assert slot_size([1000] * 400, 4, 512) == 1024
    assert slot_size([1 << 30] * 400, 4, 2 << 20) == 128 << 20
    assert slot_size([1000] * 400 + [10**6], 4, 512) == 1024
    assert rounded(1) == rounded(8) == 8


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_what_is_copied_when_all_is_over_is_nan(kind: torch.dtype) -> None:
    words = [torch.zeros((), dtype=torch.int32) for _ in range(2)]
    mask = Mask(words)
    source = torch.arange(512, dtype=torch.int16).view(torch.uint8)  # any bits: also NaN and tiny numbers
    target = torch.empty_like(source)
    mask.copy(source, target, numbers=True)
    assert torch.equal(source, target)
    assert not mask.spoilt
    for values in ((-1, 0), (0, 1), (-1, 1)):
        for word, value in zip(words, values, strict=True):
            word.fill_(value)
        mask.copy(source, target, numbers=True)
        assert bool(target.view(kind).isnan().all())
        assert mask.spoilt


def test_indices_point_nowhere_when_all_is_over() -> None:
    words = [torch.zeros((), dtype=torch.int32) for _ in range(2)]
    mask = Mask(words)
    source, target = torch.arange(64), torch.empty(64, dtype=torch.int64)
    mask.copy(source.view(torch.uint8), target.view(torch.uint8), numbers=False)
    assert torch.equal(source, target)
    words[0].fill_(-1)
    mask.copy(source.view(torch.uint8), target.view(torch.uint8), numbers=False)
    assert not bool(target.any())


def test_a_guard_hands_slots_over_when_the_agent_is_gone(torch_node: Node) -> None:
    with ema.connect(torch_node.socket, gpu=torch_node.gpus[0], name="guarded") as pool:
        out, back = pool.window(2, pool.granularity), pool.window(2, pool.granularity)
        guard = Guard(pool, out, back)
        page, word = pool.shared, back.first * wire.SLOT_WORDS + wire.SLOT_WORDS - 1
        out[1].fill()
        assert (page.load(word), guard.lost) == (0, None)

        lease = LeaseId(pool.lease)
        torch_node.on_loop(lambda: torch_node.agent.sessions[lease].line.connection.close("the test ends it"))
        until(lambda: guard.lost is not None)
        assert isinstance(guard.lost, ema.AgentLost)
        until(lambda: page.load(word) == 0xFFFFFFFF)
        for _ in range(2):  # as a stream that goes on hands them over the other way
            for slot in out.slots:
                page.store(slot.number * wire.SLOT_WORDS, wire.FULL)
            for slot in back.slots:
                page.store(slot.number * wire.SLOT_WORDS, wire.EMPTY)
            for slot in out.slots:
                assert page.wait(slot.number * wire.SLOT_WORDS, wire.EMPTY, 5.0)
            for slot in back.slots:
                assert page.wait(slot.number * wire.SLOT_WORDS, wire.FULL, 5.0)
        guard.close()
        guard.close()
    torch_node.until(lambda a: not a.sessions, saying="the session has ended")
