"""Quantities: Kubernetes' grammar, one canonical text per value."""

from contextlib import suppress
from decimal import Decimal, localcontext
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_core.errors import InvalidInput
from ema_core.quantity import MAX_BYTES, format_quantity, parse_duration, parse_percent, parse_quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("4Gi", 4 << 30),
        ("1.5Gi", 1_610_612_736),
        ("08G", 8_000_000_000),  # Go strips leading zeros
        ("1.", 1),
        (".5G", 500_000_000),
        ("+3Ki", 3072),
        ("-0", 0),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1E3", 1000),
        ("12e-1", 2),  # 1.2 bytes, rounded up as Quantity.Value() does
        ("1e+3", 1000),
        ("1500m", 2),
        ("1n", 1),
        ("0.1Ki", 103),
        (str(MAX_BYTES), MAX_BYTES),
        (20, 20),
        (1.5, 2),
    ],
)
def test_what_go_accepts_is_accepted(text: object, amount: int) -> None:
    assert parse_quantity(text, "f") == amount


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "4GB", "4G ", " 4G", "4 Gi", "-1", "-1Gi", "1.1.M", "1+1.0M", "0.1mi", ".5i", "1i", "1e", "e3", "-"],
        *["+", ".", "1_000", "0x10", "50%", "50 %", "4gi", "4K", "inf", "nan", "\u0663Gi", "4Gi\n", "1e3.5", "1e99"],
        *["8Ei", "9" * 99, None, True, [], {}, float("nan"), float("inf"), -1],
    ],
)
def test_all_else_is_refused_with_field_value_and_what_would_be_right(text: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_quantity(text, "spec.lending.headroom")
    (error,) = refused.value.errors
    assert error.field == "spec.lending.headroom"
    assert error.value is text
    assert "expected" in str(error)


def test_a_negative_never_makes_credit() -> None:
    with pytest.raises(InvalidInput, match=r"limit: got '-1Gi'; expected a quantity of bytes, not negative"):
        parse_quantity("-1Gi", "limit")


@pytest.mark.parametrize("text", ["2k", "2000", "2e3", "0.002M", "2000000m"])
def test_one_canonical_text_for_one_value(text: str) -> None:
    assert format_quantity(parse_quantity(text, "f")) == "2k"


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1024, "1Ki"),
        (64_000_000_000, "64G"),
        (3 << 30, "3Gi"),
        (1_610_612_736, "1536Mi"),
        (1500, "1500"),
    ],
)
def test_canonical_text_uses_the_unit_with_the_smallest_whole_number(amount: int, text: str) -> None:
    assert format_quantity(amount) == text


@given(st.integers(0, MAX_BYTES))
def test_canonical_text_round_trips(amount: int) -> None:
    assert parse_quantity(format_quantity(amount), "f") == amount


def test_a_negative_amount_has_no_text() -> None:
    with pytest.raises(ValueError, match="never negative"):
        format_quantity(-1)


_ORACLE_SCALES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12}


@given(
    st.text("0123456789", min_size=1, max_size=6),
    st.text("0123456789", max_size=6),
    st.sampled_from([*_ORACLE_SCALES, "Ki", "Mi", "Gi", "Ti", "e-3", "E2", "e+4"]),
    st.sampled_from(["", "+"]),
)
def test_values_agree_with_decimal_arithmetic(whole: str, part: str, suffix: str, sign: str) -> None:
    text = f"{sign}{whole}.{part}{suffix}"
    with localcontext() as context:
        context.prec = 60
        number = Fraction(Decimal(f"{whole}.{part or 0}"))
        if suffix.endswith("i"):
            number *= 1024 ** (1 + "KMGT".index(suffix[0]))
        elif suffix[:1] in {"e", "E"}:
            number *= Fraction(Decimal(10) ** int(suffix[1:]))
        else:
            number *= Fraction(Decimal(10) ** _ORACLE_SCALES[suffix])
    assert parse_quantity(text, "f") == ceil(number)


@given(st.text("0123456789.+-eEinumkKMGTP", max_size=12))
def test_any_text_is_a_value_or_a_refusal(text: str) -> None:
    with suppress(InvalidInput):
        assert 0 <= parse_quantity(text, "f") <= MAX_BYTES


@pytest.mark.parametrize(("text", "percent"), [("0%", 0), ("50%", 50), ("100%", 100)])
def test_percent(text: str, percent: int) -> None:
    assert parse_percent(text, "f") == percent


@pytest.mark.parametrize("text", ["50 %", "%", "101%", "-1%", "5.5%", "50", 50, "50%%", None])
def test_wrong_percent(text: object) -> None:
    with pytest.raises(InvalidInput, match="such as 50%"):
        parse_percent(text, "f")


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("50ms", 0.05), ("1m30s", 90.0), ("1.5h", 5400.0), ("0s", 0.0)]
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text, "f") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", 5, "", "5 s", "-5s", "s", "5sec", "1d"])
def test_wrong_duration(text: object) -> None:
    with pytest.raises(InvalidInput, match="with its unit"):
        parse_duration(text, "f")
