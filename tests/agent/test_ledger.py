"""The ledger against a model of it: every transition, allowed or not, in any order."""

from collections import Counter
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ema_agent.gates import Gate
from ema_agent.lease import Chunk, Lease, Region, State
from ema_agent.ledger import Ledger, LedgerError
from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName
from ema_driver.protocol import Address, Handle, Words

CHUNK = 4096
A, B = GpuId(Place("GPU-a")), GpuId(Place("GPU-b"))
PLACES: tuple[Place, ...] = (A, B, HOST)

MAY: dict[str, set[str]] = {
    "dirty": {"clean", "moving", "lost"},
    "clean": {"dirty", "moving", "lost"},
    "host": {"moving"},
    "moving": {"dirty", "clean", "host", "dropped", "lost"},
    "dropped": {"lost"},
    "lost": set(),
}
"""The drawing at the top of the module, written down a second time."""


class Page:
    """Words that nothing else sees."""

    def __init__(self) -> None:
        self.words = Counter[int]()

    def load(self, index: int) -> int:
        return self.words[index]

    def store(self, index: int, value: int) -> None:
        self.words[index] = value


def gate() -> Gate:
    return Gate(cast(Words, Page()), 0)


def lease(name: str = "l") -> Lease:
    return Lease(LeaseId(name), PoolName("p"), A, CHUNK)


def arrive(ledger: Ledger, entry: Lease, region: Region, index: int) -> Chunk:
    return ledger.arrive(entry, region, index, address=Address(0), gate=gate(), handle=cast(Handle, object()))


class Model(RuleBasedStateMachine):
    """Two leases with a kept and a droppable region each, and what must be true of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.leases = [lease("one"), lease("two")]
        self.promised: dict[tuple[int, int, int], Place] = {}
        """(lease, region, index) → place."""
        self.live: dict[int, tuple[Chunk, int, str, Place]] = {}
        """Chunk → itself, lease, state, place."""
        self.past: list[Chunk] = []
        self.repeats = 0
        for entry in self.leases:
            self.ledger.open_lease(entry)
            for number in (0, 1):
                entry.regions[number] = Region(number, droppable=number == 1, chunks=[None] * 4)

    spot = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 3))
    place = st.sampled_from(PLACES)

    def region(self, spot: tuple[int, int, int]) -> tuple[Lease, Region, int]:
        entry = self.leases[spot[0]]
        return entry, entry.regions[spot[1]], spot[2]

    def taken(self, spot: tuple[int, int, int]) -> bool:
        entry, region, index = self.region(spot)
        return any(c.lease is entry and c.region is region and c.index == index for c, *_ in self.live.values())

    @rule(spot=spot, place=place)
    def promise(self, spot: tuple[int, int, int], place: Place) -> None:
        if spot in self.promised or self.taken(spot):
            with pytest.raises(LedgerError, match="waits for nothing"):
                self.ledger.promise(*self.region(spot), place)
            return
        self.ledger.promise(*self.region(spot), place)
        self.promised[spot] = place

    @rule(spot=spot)
    def withdraw(self, spot: tuple[int, int, int]) -> None:
        self.ledger.withdraw(*self.region(spot))
        if self.promised.pop(spot, None) is None:
            self.repeats += 1

    @rule(spot=spot)
    def arrive(self, spot: tuple[int, int, int]) -> None:
        if spot not in self.promised:
            with pytest.raises(LedgerError, match="promised nothing"):
                arrive(self.ledger, *self.region(spot))
            return
        place = self.promised.pop(spot)
        chunk = arrive(self.ledger, *self.region(spot))
        self.live[chunk.id] = chunk, spot[0], "host" if place == HOST else "dirty", place

    @precondition(lambda self: self.live)
    @rule(data=st.data(), state=st.sampled_from(State), place=st.none() | place)
    def become(self, data: st.DataObject, state: State, place: Place | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        chunk, owner, was, at = self.live[number]
        if state.value not in MAY[was]:
            with pytest.raises(LedgerError, match=f"{was} → {state}"):
                self.ledger.become(chunk, state, place=place)
            return
        self.ledger.become(chunk, state, place=place)
        self.live[number] = chunk, owner, state.value, place or at

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        chunk = self.live.pop(number)[0]
        assert self.ledger.free(chunk)
        self.past.append(chunk)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.past))
        assert not self.ledger.free(chunk)
        self.repeats += 1
        with pytest.raises(LedgerError, match="was given back"):
            self.ledger.become(chunk, State.MOVING)

    @rule(which=st.integers(0, 1))
    def close_a_lease_that_holds_something(self, which: int) -> None:
        entry = self.leases[which]
        if any(owner == which for _, owner, _, _ in self.live.values()) or any(s[0] == which for s in self.promised):
            with pytest.raises(LedgerError, match="still holds"):
                self.ledger.close_lease(entry.id)
        else:
            self.ledger.close_lease(entry.id)
            self.ledger.close_lease(entry.id)
            self.repeats += 1
            self.ledger.open_lease(entry)

    @invariant()
    def books_agree(self) -> None:
        held: Counter[tuple[int, Place, str]] = Counter()
        for chunk, owner, state, place in self.live.values():
            assert chunk.state.value == state
            if state in {"dropped", "lost"}:
                continue
            kind = "droppable" if chunk.droppable else "clean" if state in {"clean", "host"} else "dirty"
            held[owner, place, kind] += CHUNK
        for (owner, number, _), place in self.promised.items():
            held[owner, place, "droppable" if number else "dirty"] += CHUNK
        for place in PLACES:
            assert self.ledger.lent[place] == sum(size for (_, at, _), size in held.items() if at == place)
        seen = {entry.id: entry for entry in self.ledger.policy_leases()}
        for owner, entry in enumerate(self.leases):
            book = seen[entry.id].held
            for place in PLACES:
                h = book.get(place)
                amounts = (0, 0, 0) if h is None else (h.clean, h.dirty, h.droppable)
                assert amounts == tuple(held[owner, place, kind] for kind in ("clean", "dirty", "droppable"))
            assert entry.borrowed == sum(size for (who, _, _), size in held.items() if who == owner)
            for droppable in (False, True):
                gone = sum(
                    1
                    for chunk, who, state, _ in self.live.values()
                    if who == owner and chunk.droppable is droppable and state in {"dropped", "lost"}
                )
                assert entry.wanted(droppable=droppable) == (4 - gone) * CHUNK

    @invariant()
    def repeats_are_counted(self) -> None:
        assert self.ledger.repeats == self.repeats


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_ledger_agrees_with_a_model_of_it = Model.TestCase


def test_a_lease_that_closes_waits_for_nothing() -> None:
    ledger, entry = Ledger(), lease()
    ledger.open_lease(entry)
    region = entry.regions[0] = Region(0, droppable=False, chunks=[None, None])
    ledger.promise(entry, region, 0, A)
    assert entry.wanted(droppable=False) == 2 * CHUNK
    entry.closing = True
    assert entry.wanted(droppable=False) == CHUNK
    assert not list(entry.missing(droppable=False))
    assert [e.kept for e in ledger.policy_leases()] == [CHUNK]


def test_what_was_renewed_in_vain_is_neither_wanted_nor_there() -> None:
    ledger, entry = Ledger(), lease()
    ledger.open_lease(entry)
    region = entry.regions[0] = Region(0, droppable=True, chunks=[None] * 3)
    region.holes.add(1)
    assert region.missing == [0, 2]
    assert region.gone == [1]
    assert entry.wanted(droppable=True) == 2 * CHUNK
    with pytest.raises(LedgerError, match="waits for nothing"):
        ledger.promise(entry, region, 1, A)


def test_victims_are_clean_first_then_coldest_and_never_one_that_is_being_copied() -> None:
    ledger, entry = Ledger(), lease()
    ledger.open_lease(entry)
    region = entry.regions[0] = Region(0, droppable=False, chunks=[None] * 4)
    chunks = []
    for index in range(4):
        ledger.promise(entry, region, index, B)
        chunks.append(arrive(ledger, entry, region, index))
        chunks[-1].last_used = 10.0 - index
    ledger.become(chunks[1], State.CLEAN)
    ledger.become(chunks[2], State.CLEAN)
    chunks[2].busy = True
    assert ledger.pick(entry.id, B, 4 * CHUNK, droppable=False) == [chunks[1], chunks[3], chunks[0]]
    assert ledger.pick(entry.id, B, 2 * CHUNK - 1, droppable=False) == [chunks[1]]
    assert ledger.pick(entry.id, A, 4 * CHUNK, droppable=False) == []
    assert ledger.pick(LeaseId("nobody"), B, 4 * CHUNK, droppable=False) == []


@pytest.mark.parametrize("was", State)
def test_no_transition_is_possible_that_is_not_drawn(was: State) -> None:
    way = {State.CLEAN: [State.CLEAN], State.MOVING: [State.MOVING], State.LOST: [State.LOST]}
    way |= {State.HOST: [State.MOVING, State.HOST], State.DROPPED: [State.MOVING, State.DROPPED], State.DIRTY: []}
    for to in State:
        ledger, entry = Ledger(), lease()
        ledger.open_lease(entry)
        region = entry.regions[0] = Region(0, droppable=False, chunks=[None])
        ledger.promise(entry, region, 0, B)
        chunk = arrive(ledger, entry, region, 0)
        for state in way[was]:
            ledger.become(chunk, state)
        if to.value in MAY[was.value]:
            ledger.become(chunk, to)
        else:
            with pytest.raises(LedgerError):
                ledger.become(chunk, to)
            assert chunk.state is was
