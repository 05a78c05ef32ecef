"""The check of bytes sees every byte that is wrong, and bytes that are right elsewhere."""

from hypothesis import given
from hypothesis import strategies as st

from ema_cli.demo.pattern import STARTS, Pattern

PATTERN = Pattern(seed=1, largest=1 << 16)


@given(
    owner=st.integers(0, STARTS - 1),
    at=st.integers(0, 1000),
    size=st.integers(1, 5000),
    where=st.integers(0, 4999),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_is_one_wrong_byte(owner: int, at: int, size: int, where: int, bit: int) -> None:
    there = bytearray(PATTERN.bytes_of(owner, at, size))
    assert PATTERN.wrong(memoryview(there), owner, at) == 0
    there[where % size] ^= 1 << bit
    assert PATTERN.wrong(memoryview(there), owner, at) == 1


@given(owner=st.integers(0, STARTS - 1), other=st.integers(0, STARTS - 1), at=st.integers(0, 1000))
def test_bytes_of_another_request_are_wrong(owner: int, other: int, at: int) -> None:
    wrong = PATTERN.wrong(PATTERN.bytes_of(other, at, 64), owner, at)
    assert (wrong == 0) is (owner == other)


@given(owner=st.integers(0, 5000), at=st.integers(0, 1000), shift=st.integers(1, 1000))
def test_bytes_of_another_place_are_wrong(owner: int, at: int, shift: int) -> None:
    assert PATTERN.wrong(PATTERN.bytes_of(owner, at + shift, 64), owner, at) > 0
