"""Addresses are looked up before the driver is asked: it would take an unknown one for ordinary memory."""

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_driver.cuda.nvml import plausible
from ema_driver.cuda.ready import CudaCalls, Prepared
from ema_driver.cuda.space import Space
from ema_driver.errors import InvalidUse, NotMapped

UNIT = 16
BASE = 1 << 20


def space(units: int) -> Space:
    made = Space(UNIT)
    made.enter(BASE, units * UNIT)
    return made


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4)), max_size=8),
    st.integers(0, 12 * UNIT - 1),
    st.integers(0, 12 * UNIT),
)
def test_pieces_are_exactly_what_is_mapped(wanted: list[tuple[int, int]], offset: int, size: int) -> None:
    made = space(12)
    owner: dict[int, int] = {}
    for number, (at, units) in enumerate(wanted):
        cells = range(at * UNIT, (at + units) * UNIT)
        fits = at + units <= 12 and not any(cell in owner for cell in cells)
        try:
            made.map([(BASE + at * UNIT, units * UNIT)])
        except InvalidUse:
            assert not fits
        else:
            assert fits
            made.done(BASE + at * UNIT)
            owner.update(dict.fromkeys(cells, number))
    cells = range(offset, offset + size)
    if all(cell in owner for cell in cells):
        pieces = list(made.pieces(BASE + offset, size))
        assert [cell for at, n in pieces for cell in range(at - BASE, at - BASE + n)] == list(cells)
        assert all(len({owner[c - BASE] for c in range(at, at + n)}) == 1 for at, n in pieces)
    else:
        with pytest.raises(InvalidUse, match="nothing is mapped"):
            list(made.pieces(BASE + offset, size))


def test_a_batch_of_mappings_is_entered_whole_or_not_at_all() -> None:
    made = space(4)
    with pytest.raises(InvalidUse, match="already mapped"):
        made.map([(BASE, UNIT), (BASE + UNIT, 2 * UNIT), (BASE, UNIT)])
    made.map([(BASE, 4 * UNIT)])
    with pytest.raises(InvalidUse, match="still has memory"):
        made.leave([BASE])
    with pytest.raises(InvalidUse, match="exactly"):
        made.unmap([BASE + UNIT])
    assert made.unmap([BASE]) == [(BASE, 4 * UNIT)]
    assert made.leave([BASE]) == [(BASE, 4 * UNIT)]


@pytest.mark.parametrize(
    ("total", "reserved", "free"), [(2**64 - 1, 0, 5), (0, 0, 0), (100, 60, 50), (100, 0, 101), (100, -1, 5)]
)
def test_memory_records_that_cannot_be_true_are_left_out(total: int, reserved: int, free: int) -> None:
    assert plausible(total, reserved, free) is None


def test_a_true_record_adds_up() -> None:
    info = plausible(100, 10, 30)
    assert info is not None
    assert (info.total, info.reserved, info.used, info.free) == (100, 10, 60, 30)


class Recorder:
    """A stream that counts what is queued."""

    def __init__(self) -> None:
        self.made = 0

    def make(self, calls: Sequence[Prepared]) -> None:
        self.made += len(calls)

    def launch(self, executable: object) -> None:  # noqa: ARG002
        raise AssertionError

    def destroy_graph(self, executable: object) -> None:  # noqa: ARG002
        raise AssertionError


def test_calls_are_queued_only_while_all_that_they_touch_is_mapped() -> None:
    made, stream = space(4), Recorder()
    calls = CudaCalls(stream, made, [(lambda: (0,), ())], [(BASE, UNIT), (BASE + 2 * UNIT, UNIT)])
    with pytest.raises(NotMapped):
        calls.launch()
    made.map([(BASE, UNIT), (BASE + 2 * UNIT, UNIT)])
    with pytest.raises(NotMapped):
        calls.launch()  # not by the driver yet
    made.done(BASE)
    with pytest.raises(NotMapped):
        calls.launch()
    made.done(BASE + 2 * UNIT)
    calls.launch()
    made.map([(BASE + 3 * UNIT, UNIT)])
    made.unmap([BASE + 3 * UNIT])
    calls.launch()
    made.unmap([BASE])
    with pytest.raises(NotMapped):
        calls.launch()
    made.map([(BASE, UNIT)])
    with pytest.raises(NotMapped):
        calls.launch()
    made.done(BASE)
    calls.launch()
    assert stream.made == 3
    calls.close()
    with pytest.raises(InvalidUse, match="closed"):
        calls.launch()


def test_nothing_is_unmapped_while_calls_are_queued() -> None:
    made = space(1)
    made.map([(BASE, UNIT)])
    made.done(BASE)
    gone = threading.Event()

    def unmap() -> None:
        made.unmap([BASE])
        gone.set()

    with made.steady():
        thread = threading.Thread(target=unmap)
        thread.start()
        assert not gone.wait(0.1)
        made.check([(BASE, UNIT)])
    thread.join(5)
    assert gone.is_set()
    with pytest.raises(NotMapped):
        made.check([(BASE, UNIT)])
