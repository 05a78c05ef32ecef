"""`ema demo` as a user runs it: a short one, bad input, Ctrl-C, a worker that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEMO = [sys.executable, "-c", "from ema_cli.main import run; run()", "demo"]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the demo puts its own; afterwards nothing of it is left, and no process."""
    made = tmp_path_factory.mktemp("d")
    yield made
    assert not list(made.glob("ema-demo-*"))
    assert processes(made) == {}


def processes(folder: Path) -> dict[int, str]:
    """Processes that were started with this folder for temporary files."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended just now, or is somebody else's
    return found


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "200"}
    command = [*DEMO, "--gpus", "2", "--svg", str(folder / "demo.svg"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def until(condition: Callable[[], bool], what: str, patience: float = 30.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def read_until(demo: subprocess.Popen[str], text: str) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if text in line:
            return
    pytest.fail(f"{text!r} was never said")


def test_three_runs(folder: Path) -> None:
    demo = start(folder, "--duration", "3s", "--rate", "3", "--json")
    out, said = demo.communicate(timeout=90)
    answer = json.loads(out)
    assert demo.returncode in {0, 1}, said  # 1: so short a run on a busy machine may differ from its replay
    assert list(answer["runs"]) == ["static partition", "borrowing", "twice the memory"]
    for run in answer["runs"].values():
        assert run["wrong_bytes"] == 0
        assert run["leaked_bytes"] == 0
        assert run["checked_bytes_real"] > 0
        assert 0 < run["served"] <= run["offered"]
    assert answer["runs"]["borrowing"]["fetched_bytes_real"] > 0
    assert answer["runs"]["static partition"]["fetched_bytes_real"] == 0
    picture = (folder / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert "GPU 1" in picture


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["starting", "serving"])
def test_ctrl_c_leaves_nothing_behind(folder: Path, number: signal.Signals, when: str) -> None:
    demo = start(folder, "--duration", "20s", "--rate", "3")
    read_until(demo, "[1/3] static partition: starting")
    if when == "serving":
        until(lambda: any("demo.worker" in name for name in processes(folder).values()), "no worker was started")
    demo.send_signal(number)
    demo.send_signal(number)
    _, said = demo.communicate(timeout=30)
    assert demo.returncode == 130, said
    assert "nothing is left behind" in said
    assert not list(folder.rglob("*.svg"))


def test_a_worker_that_dies_ends_the_demo_with_a_message(folder: Path) -> None:
    demo = start(folder, "--duration", "20s", "--rate", "3")
    until(lambda: any("demo.worker" in name for name in processes(folder).values()), "no worker was started")
    os.kill(next(pid for pid, name in processes(folder).items() if "demo.worker" in name), signal.SIGKILL)
    _, said = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "the worker of GPU" in said
    assert "SIGKILL" in said


def test_an_agent_that_dies_ends_the_demo_with_a_message(folder: Path) -> None:
    demo = start(folder, "--duration", "20s", "--rate", "3")
    until(lambda: any("demo.worker" in name for name in processes(folder).values()), "no worker was started")
    os.kill(next(pid for pid, name in processes(folder).items() if " up --driver sim" in name), signal.SIGKILL)
    _, said = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "agent" in said


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--memory", "4Gi"], "--model", "4294967296"),
        (["--memory", "lots"], "--memory", "lots"),
        (["--speed", "0"], "--speed", "0"),
        (["--scale", "1000"], "--scale", "1000"),
        (["--duration", "9999s"], "--duration", "9999"),
        (["--duration", "5"], "--duration", "5"),
        (["--rate", "-1"], "--rate", "-1"),
        (["--link", "ethernet"], "--link", "ethernet"),
        (["--active", "3"], "--active", "3"),
        (["--model", "gpt"], "--model", "gpt"),
        (["--gpu", "abacus"], "--gpu", "abacus"),
        (["--seed", "-1"], "--seed", "-1"),
        (["--patience", "soon"], "--patience", "soon"),
        (["--trace", "/nowhere.csv"], "--trace", "/nowhere.csv"),
        (["--svg", "/nowhere/demo.svg"], "--svg", "/nowhere/demo.svg"),
    ],
)
def test_bad_input_names_field_value_and_remedy(folder: Path, options: list[str], field: str, value: str) -> None:
    demo = start(folder, *options)
    out, said = demo.communicate(timeout=30)
    assert demo.returncode == 2, said
    assert field in said
    assert value in said
    assert "expected" in said
    assert out == ""
