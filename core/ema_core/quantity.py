"""Amounts as people write them: Kubernetes' quantities in bytes, percentages, durations.

The grammar is that of `resource.Quantity` in k8s.io/apimachinery:

    quantity = [sign] number suffix        number = digits | digits "." [digits] | "." digits
    suffix   = "n" | "u" | "m" | "" | "k" | "M" | "G" | "T" | "P" | "E"
             | "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" | ("e" | "E") [sign] digits

As in Go leading zeros are fine (`08G`), fractions are (`1.5Gi`, `1.`, `.5G`), and a value that is no whole number of
bytes is rounded up, away from zero. Two liberties of Go's code that its own documented grammar does not have are not
copied: a bare sign, and amounts beyond 2^63 - 1, which Go caps silently and which are refused here.
"""

import re
from fractions import Fraction

from ema_core.errors import InvalidInput

MAX_BYTES = 2**63 - 1
"""Largest amount: what Go's int64 holds."""

_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]+))?",
)
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_SCALES: dict[str | None, Fraction] = {
    None: Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(scale) for suffix, scale in (_BINARY | _DECIMAL).items()},
}
_BYTES = "a quantity of bytes, not negative, such as 24Gi, 1.5Gi, 500M or 0"
_MAX_TEXT = 64  # long enough for any sensible amount, short enough that huge powers of ten never cost anything
_MAX_EXPONENT = 40

_PERCENT = re.compile(r"[0-9]{1,3}%")
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:us|ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_quantity(text: object, field: str) -> int:
    """Bytes, rounded up to a whole number. `text` is a string or, as Kubernetes allows, a bare number.

    Raises InvalidInput, naming `field`.
    """
    refusal = InvalidInput.of(field, text, _BYTES)
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise refusal
    if isinstance(text, int) and abs(text) > MAX_BYTES:
        raise InvalidInput.of(field, text, f"at most {MAX_BYTES} bytes (just under 8Ei)")
    written = str(text)
    match = _QUANTITY.fullmatch(written) if len(written) <= _MAX_TEXT else None
    if match is None:
        raise refusal
    whole, part = match["whole"], match["part"] or ""
    if not whole and not part:
        raise refusal
    scale = _SCALES[match["suffix"]]
    if match["exponent"] is not None:
        exponent = int(match["exponent"])
        if abs(exponent) > _MAX_EXPONENT:
            raise InvalidInput.of(field, text, f"an exponent between -{_MAX_EXPONENT} and {_MAX_EXPONENT}")
        scale = Fraction(10) ** exponent
    value = Fraction(int(whole + part), 10 ** len(part)) * scale
    if match["sign"] == "-" and value:
        raise refusal
    amount = -(-value.numerator // value.denominator)
    if amount > MAX_BYTES:
        raise InvalidInput.of(field, text, f"at most {MAX_BYTES} bytes (just under 8Ei)")
    return amount


def format_quantity(amount: int) -> str:
    """The one canonical text of an amount in bytes: in the unit that leaves the smallest whole number, binary on a tie.

    `parse_quantity` gives the same amount back. Raises ValueError for a negative amount.
    """
    if amount < 0:
        raise ValueError(f"an amount in bytes is never negative, got {amount}")
    if amount == 0:
        return "0"
    fitting = [(amount // scale, suffix) for suffix, scale in (_BINARY | _DECIMAL).items() if amount % scale == 0]
    number, suffix = min(fitting, key=lambda unit: unit[0], default=(amount, ""))
    return f"{number}{suffix}"


def parse_percent(text: object, field: str) -> int:
    """A whole percentage, 0 to 100, written like `50%`. Raises InvalidInput, naming `field`."""
    if isinstance(text, str) and _PERCENT.fullmatch(text) and int(text[:-1]) <= 100:
        return int(text[:-1])
    raise InvalidInput.of(field, text, "a whole percentage from 0% to 100%, without a space, such as 50%")


def parse_duration(text: object, field: str) -> float:
    """Seconds, from Go's notation: `5s`, `50ms`, `1m30s`. Raises InvalidInput, naming `field`."""
    if isinstance(text, str) and len(text) <= _MAX_TEXT and _DURATION.fullmatch(text):
        return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    raise InvalidInput.of(field, text, "a duration with its unit, such as 50ms, 5s or 1m30s")
