"""What a user may pass: each check gives the value back, or raises BadInput naming field, value and what is right."""

import operator
from typing import Final

from ema.errors import BadInput

MOST: Final = 1 << 56
"""Bytes are never more."""


def whole(field: str, value: object, least: int, most: int = MOST) -> int:
    """A whole number (also NumPy's)."""
    expected = f"a whole number from {least} to {most}"
    if isinstance(value, bool):
        raise BadInput(field, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadInput(field, repr(value), expected) from None
    if not least <= number <= most:
        raise BadInput(field, number, expected)
    return number


def seconds(field: str, value: object) -> float:
    """A time of 0 or more seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise BadInput(field, repr(value), "0 or more seconds")
    return float(min(value, 1e9))


def patience(field: str, value: object) -> float | None:
    """A time of 0 or more seconds, or None: as long as it takes."""
    return None if value is None else seconds(field, value)


def buffer(field: str, value: object, *, writable: bool) -> memoryview:
    """A contiguous buffer's bytes, at least one."""
    what = "a writable buffer" if writable else "a buffer"
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadInput(
            field, repr(value)[:80], f"a slot, or {what} such as {'bytearray' if writable else 'bytes'}"
        ) from None
    if not view.c_contiguous or not view.nbytes:
        raise BadInput(
            field, f"{view.nbytes} bytes, strides {view.strides}", f"{what} of contiguous bytes, at least one"
        )
    if writable and view.readonly:
        raise BadInput(field, "read-only", what)
    return view.cast("B")
