"""Options that `ema replay` and `ema demo` have in common, checked."""

from pathlib import Path

from ema_cli.serving.trace import Request, read_trace
from ema_core.errors import InvalidInput


def requests_of(field: str, trace: Path) -> list[Request]:
    """What is in a trace. Raises InvalidInput."""
    try:
        return list(read_trace(trace))
    except OSError as error:
        raise InvalidInput.of(field, str(trace), f"a readable file ({error.strerror})") from error


def active_of(active: int | None, gpus: int) -> int:
    """How many GPUs have requests at a time: a quarter, unless said. Raises InvalidInput."""
    if active is None:
        return max(1, gpus // 4)
    if active > gpus:
        raise InvalidInput.of("--active", active, f"at most {gpus}, the number of GPUs")
    return active


def within(field: str, value: float, most: int) -> float:
    """The value, if it is above 0 and at most `most`. Raises InvalidInput."""
    if not 0 < value <= most:
        raise InvalidInput.of(field, value, f"a number above 0, at most {most}")
    return value


def rate_of(rate: float | None) -> float | None:
    """The load, if one was chosen. Raises InvalidInput."""
    return None if rate is None else within("--rate", rate, 1_000_000)
