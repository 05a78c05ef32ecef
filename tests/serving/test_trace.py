"""Traces: what is read, and what a refusal says."""

import gzip
from pathlib import Path

import pytest

from ema_cli.serving.trace import Request, read_trace
from ema_core.errors import InvalidInput

CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.7500000,396,109\n"
)
JSONL = (
    '{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1250, "input_length": 12, "output_length": 1}\n'
)


def write(tmp_path: Path, data: str | bytes, name: str = "t") -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_csv(tmp_path: Path, end: str) -> None:
    path = write(tmp_path, CSV.replace("\n", end))
    assert list(read_trace(path)) == [Request(0, 0.0, 374, 44), Request(1, 4.25, 396, 109)]


def test_mooncake_jsonl(tmp_path: Path) -> None:
    assert list(read_trace(write(tmp_path, JSONL))) == [Request(0, 0.0, 6758, 500), Request(1, 0.25, 12, 1)]


@pytest.mark.parametrize("text", [CSV, JSONL])
def test_gzip_is_seen_by_its_content(tmp_path: Path, text: str) -> None:
    plain, packed = write(tmp_path, text), write(tmp_path, gzip.compress(text.encode()), "packed")
    assert list(read_trace(plain)) == list(read_trace(packed))


def test_columns_may_stand_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path, "GeneratedTokens,User,TIMESTAMP,ContextTokens\n5,x,2023-11-16 18:15:46Z,7\n")
    assert list(read_trace(path)) == [Request(0, 0.0, 7, 5)]


ROW = "2023-11-16 18:15:51,1,1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t line 1: got ''; expected a CSV header"),
        ("a,b,c\n1,2,3\n", "t line 1: got 'a,b,c'; expected a header with TIMESTAMP"),
        (CSV.split("\n", maxsplit=1)[0] + "\n", "t: got 'no requests'; expected at least one request"),
        (CSV + "2023-11-16 18:15:51,-3,1\n", "t line 4, ContextTokens: got '-3'; expected a whole number of tokens"),
        (CSV + "2023-11-16 18:15:51,3,0\n", "t line 4, GeneratedTokens: got 0; expected a whole number of tokens"),
        (CSV + "2023-11-16 18:15:51,3,1.5\n", "t line 4, GeneratedTokens: got '1.5'"),
        (CSV + "2023-13-16 18:15:51,3,1\n", "t line 4, TIMESTAMP: got '2023-13-16 18:15:51'; expected a time"),
        (CSV + "yesterday,3,1\n", "t line 4, TIMESTAMP: got 'yesterday'"),
        (CSV + "2023-11-16 18:15:51,3\n", "t line 4: got '2023-11-16 18:15:51,3'; expected 3 fields"),
        (CSV + "2023-11-16 18:15:40,3,1\n", "t line 4, time: got .*; expected a time not before"),
        (JSONL + "{]\n", "t line 3: got '{]'; expected a JSON object"),
        (JSONL + "[1]\n", r"t line 3: got \[1\]; expected a JSON object with timestamp"),
        (JSONL + '{"timestamp": -1, "input_length": 1, "output_length": 1}', "t line 3, timestamp: got -1"),
        (JSONL + '{"timestamp": NaN, "input_length": 1, "output_length": 1}', "t line 3, timestamp: got nan"),
        (JSONL + '{"timestamp": 3000, "input_length": true, "output_length": 1}', "t line 3, input_length: got True"),
        (JSONL + '{"timestamp": 3000, "input_length": 1}', "t line 3, output_length: got None"),
    ],
)
def test_wrong_lines_are_refused_by_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        list(read_trace(write(tmp_path, text)))


def test_a_cut_gzip_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for data in (gzip.compress(CSV.encode())[:-9], CSV.encode() + b"\xff\xfe\n"):
        with pytest.raises(InvalidInput, match="a whole gzip or UTF-8 text file"):
            list(read_trace(write(tmp_path, data)))


def test_requests_come_as_they_are_asked_for(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, CSV + "rubbish\n"))
    assert next(requests).prompt == 374
    assert next(requests).prompt == 396
    with pytest.raises(InvalidInput):
        next(requests)
