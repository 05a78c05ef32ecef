"""Extents: nothing is given twice, nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_cli.demo.arena import Arena, Extent, NoRoom, parts

ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "give", "grow"]), st.integers(1, 40)), max_size=60)


@given(ACTIONS)
def test_every_byte_has_one_owner(actions: list[tuple[str, int]]) -> None:
    arena = Arena()
    taken: list[list[Extent]] = []
    for action, number in actions:
        if action == "grow":
            arena.resize(arena.size + number)
        elif action == "give" and taken:
            arena.give(taken.pop(number % len(taken)))
        elif action == "take":
            if number <= arena.free:
                taken.append(arena.take(number))
                assert sum(e.size for e in taken[-1]) == number
            else:
                with pytest.raises(NoRoom):
                    arena.take(number)
        owned = [b for extents in taken for e in extents for b in range(e.at, e.end)]
        assert len(owned) == len(set(owned))
        assert arena.free == arena.size - len(owned)
        assert all(0 <= b < arena.size for b in owned)


def test_shrinking_takes_only_what_is_free() -> None:
    arena = Arena()
    arena.resize(10)
    held = arena.take(4)
    arena.resize(4)
    with pytest.raises(ValueError, match="taken"):
        arena.resize(3)
    arena.give(held)
    arena.resize(0)
    assert arena.free == 0


def test_lowest_bytes_first_and_only_below_the_limit() -> None:
    arena = Arena()
    arena.resize(30)
    first, second = arena.take(5), arena.take(5)
    assert second == [Extent(5, 5)]
    arena.give(first)
    assert arena.take(8) == [Extent(0, 5), Extent(10, 3)]
    with pytest.raises(NoRoom):
        arena.take(8, below=20)
    assert arena.take(7, below=20) == [Extent(13, 7)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_parts_cover_just_what_is_asked_for(sizes: list[int], data: st.DataObject) -> None:
    extents = [Extent(100 * number, size) for number, size in enumerate(sizes)]
    places = [b for e in extents for b in range(e.at, e.end)]
    first = data.draw(st.integers(0, len(places)))
    last = data.draw(st.integers(first, len(places)))
    found = [(begin + i, e.at + i) for begin, e in parts(extents, first, last) for i in range(e.size)]
    assert found == [(i, places[i]) for i in range(first, last)]
