"""Reading request traces, line by line: Azure's CSV and Mooncake's JSONL, plain or gzipped.

Azure: a header with TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake: one object a line with timestamp (ms),
input_length, output_length; other fields, such as hash_ids, are not used.
"""

import csv
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from ema_core.errors import FieldError, InvalidInput

_GZIP_MAGIC = b"\x1f\x8b"
_MOST_TOKENS = 10_000_000
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_TIME_SHAPE = "a time such as 2023-11-16 18:15:46.6805900"
_TOKENS_SHAPE = f"a whole number of tokens from 1 to {_MOST_TOKENS}"
_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    id: int
    """Its place in the trace, from 0."""
    arrival: float
    """Seconds after the first request."""
    prompt: int
    """Tokens."""
    generated: int
    """Tokens."""


def read_trace(path: Path) -> Iterator[Request]:
    """The trace's requests in order of arrival, read as they are asked for.

    Raises InvalidInput with line, field, value and what would be right; OSError when the file cannot be read.
    """
    with path.open("rb") as raw:
        opened = gzip.open if raw.read(2) == _GZIP_MAGIC else Path.open
    with opened(path, "rt", encoding="utf-8", newline="") as lines:
        try:
            yield from _requests(cast(TextIO, lines), path.name)
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise InvalidInput.of(path.name, str(error), "a whole gzip or UTF-8 text file") from error


def _requests(lines: TextIO, name: str) -> Iterator[Request]:
    first = lines.readline()
    if not first.strip():
        raise InvalidInput.of(f"{name} line 1", first, f"a CSV header {','.join(_CSV_COLUMNS)}, or a JSON object")
    rows = _jsonl(first, lines, name) if first.lstrip().startswith("{") else _csv(first, lines, name)
    start = last = None
    for number, (line, time, prompt, generated) in enumerate(rows):
        start = time if start is None else start
        if last is not None and time < last:
            raise InvalidInput.of(f"{name} line {line}, time", time, "a time not before that of the line above")
        last = time
        yield Request(number, time - start, prompt, generated)
    if start is None:
        raise InvalidInput.of(name, "no requests", "at least one request")


def _csv(header: str, lines: Iterator[str], name: str) -> Iterator[tuple[int, float, int, int]]:
    columns = [column.strip() for column in header.lstrip("\ufeff").split(",")]
    missing = [column for column in _CSV_COLUMNS if column not in columns]
    if missing:
        raise InvalidInput.of(f"{name} line 1", header.strip(), f"a header with {', '.join(_CSV_COLUMNS)}")
    time_at, prompt_at, generated_at = (columns.index(column) for column in _CSV_COLUMNS)
    for line, row in enumerate(csv.reader(lines), start=2):
        if not row:
            continue
        where = f"{name} line {line}"
        if len(row) != len(columns):
            raise InvalidInput.of(where, ",".join(row), f"{len(columns)} fields, as in the header")
        time, prompt, generated = row[time_at], row[prompt_at], row[generated_at]
        yield (
            line,
            _moment(time, f"{where}, TIMESTAMP"),
            _tokens(prompt, f"{where}, ContextTokens"),
            _tokens(generated, f"{where}, GeneratedTokens"),
        )


def _jsonl(first: str, lines: Iterator[str], name: str) -> Iterator[tuple[int, float, int, int]]:
    line = 0
    while text := first if line == 0 else next(lines, ""):
        line += 1
        if not text.strip():
            continue
        where = f"{name} line {line}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of thousands of digits
            raise InvalidInput.of(where, text.strip(), f"a JSON object ({error})") from None
        if not isinstance(row, dict):
            raise InvalidInput.of(where, row, "a JSON object with timestamp, input_length, output_length")
        milliseconds = row.get("timestamp")
        # NaN compares false with everything, so it is refused too.
        if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or not 0 <= milliseconds < 1e15:
            raise InvalidInput.of(f"{where}, timestamp", milliseconds, "milliseconds, not negative")
        lengths = [_whole(row.get(field), f"{where}, {field}") for field in ("input_length", "output_length")]
        yield line, milliseconds / 1000, lengths[0], lengths[1]


def _moment(text: str, field: str) -> float:
    match = _TIME.fullmatch(text.strip())
    try:
        if match is not None:
            zone = (match[3] or "+00:00").replace("Z", "+00:00")
            whole = datetime.fromisoformat(match[1] + zone).astimezone(UTC)
            return whole.timestamp() + float(match[2] or 0)
    except ValueError:
        pass  # such as month 13; the message below says what was expected
    raise InvalidInput.of(field, text, _TIME_SHAPE)


def _tokens(text: str, field: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 12:
        return _whole(int(text), field)
    raise InvalidInput.of(field, text, _TOKENS_SHAPE)


def _whole(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
        raise InvalidInput([FieldError(field, value, _TOKENS_SHAPE)])
    return value
