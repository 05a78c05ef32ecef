"""The commands as a person runs them: a real `ema up` in a process of its own, asked and ended from outside."""

import json
import os
import re
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ema
from ema_cli.main import app
from nodes import MIB, until
from up import command, started

ROOT = Path(__file__).parents[2]
POOL = ROOT / "examples/pools/simulated.yaml"
SIM = ROOT / "examples/sim.yaml"


def refused(*arguments: str) -> str:
    """What a command says on its error stream when it refuses its input; run in this process, which is quicker."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return result.stderr


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EMA_RUNTIME_DIR": str(folder), "COLUMNS": "120", "TERM": "dumb"}
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, env=environment, check=False)


class Node:
    """`ema up` on the simulated GPUs of the examples, asked by the commands."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self.log = folder, folder.parent / "up.log"
        words = command("up", "--pool", str(POOL), "--driver", "sim", "--sim", str(SIM), *arguments)
        self.process = started(words, self.log, {"EMA_RUNTIME_DIR": str(folder)})

    def ask(self, *arguments: str) -> Any:  # noqa: ANN401 (JSON)
        done = run(self.folder, *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("up") / "run", "--metrics", "127.0.0.1:0")
    try:
        yield node
    finally:
        assert node.end() == 0
        left = sorted(p.name for p in node.folder.iterdir() if stat.S_ISSOCK(p.lstat().st_mode))
        assert left in ([], ["sim.sock"]), left  # the device process lingers for its last session


def test_status_for_people_and_for_programs(up: Node) -> None:
    answer = up.ask("status")
    assert answer["ready"] is True
    gpus = answer["gpus"]
    assert isinstance(gpus, list)
    assert [(g["index"], g["total"]) for g in gpus] == [(i, 256 * MIB) for i in range(4)]
    table = run(up.folder, "status").stdout
    assert "4 × Simulated H200" in table
    assert gpus[0]["id"][:12] in table


def test_leases_show_where_the_bytes_are_and_drain_moves_them(up: Node) -> None:
    with ema.connect(str(up.folder / "client.sock"), gpu=0, name="job") as pool:
        region = pool.region(120 * MIB)
        region.store(b"kept" * 1024, at=0)
        (lease,) = up.ask("leases")["leases"]
        assert lease["name"] == "job"
        assert sum(lease["held"].values()) == 120 * MIB
        assert "job-" in run(up.folder, "leases").stdout
        gpu_1 = next(g["id"] for g in up.ask("status")["gpus"] if g["index"] == 1)
        assert gpu_1 in lease["held"]
        assert up.ask("drain", "1") == {"gpu": gpu_1, "left": 0, "draining": True}
        (lease,) = up.ask("leases")["leases"]
        assert gpu_1 not in lease["held"]
        back = bytearray(4096)
        region.fetch(at=0, into=back)
        assert back == b"kept" * 1024
        assert "lends again" in run(up.folder, "drain", "1", "--undo").stdout


def test_pages(up: Node) -> None:
    found = re.search(r"http://(\S+)/metrics", up.log.read_text())
    assert found is not None
    base = f"http://{found[1]}"
    with urllib.request.urlopen(f"{base}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert "ema_gpu_memory_bytes{" in text
    assert 'ema_headroom_shortfall_seconds_total{gpu="GPU-' in text
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{base}/{path}", timeout=5) as page:
            assert page.read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        urllib.request.urlopen(f"{base}/nothing", timeout=5)
    missing.value.close()


def test_a_second_agent_in_the_same_folder_is_refused(up: Node) -> None:
    done = run(up.folder, "up", "--pool", str(POOL), "--driver", "sim", "--sim", str(SIM), "--metrics", "off")
    assert done.returncode == 1
    assert "an agent runs in" in done.stderr
    assert up.ask("status")["ready"] is True


def test_only_the_owner_may_connect_unless_told_otherwise(up: Node) -> None:
    assert stat.S_IMODE((up.folder / "client.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((up.folder / "admin.sock").stat().st_mode) == 0o600


def test_an_agent_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Node(folder, "--metrics", "off")
    pool = ema.connect(str(folder / "client.sock"), gpu=0)
    region = pool.region(64 * MIB)
    first.end(signal.SIGKILL)
    with pytest.raises(ema.AgentLost):
        until(lambda: region.fetch(0, bytearray(8)) is None)
    second = Node(folder, "--metrics", "off")
    until(lambda: pool.alive)
    with pytest.raises(ema.AgentLost, match="make it again"):
        region.fetch(0, bytearray(8))
    again = pool.region(64 * MIB)
    again.store(b"true", at=0)
    back = bytearray(4)
    again.fetch(0, back)
    assert back == b"true"
    pool.close()
    until(lambda: not second.ask("leases")["leases"])
    assert all(g["lent"] == 0 for g in second.ask("status")["gpus"])
    assert second.end(signal.SIGTERM) == 0


def test_no_agent_says_how_to_start_one(tmp_path: Path) -> None:
    for words in (["status"], ["leases"], ["drain", "0"]):
        done = run(tmp_path, *words)
        assert done.returncode == 1
        assert "no agent answers" in done.stderr
        assert "ema up --pool" in done.stderr


def test_the_version_is_told(tmp_path: Path) -> None:
    assert re.fullmatch(r"ema \d+\.\d+\.\d+\n", run(tmp_path, "--version").stdout)


def test_leases_fit_eighty_columns(up: Node) -> None:
    with ema.connect(str(up.folder / "client.sock"), gpu=0, name="pid-1234567") as pool:
        pool.region(64 * MIB)
        lines = run(up.folder, "leases").stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.startswith("pid-1234567-") and "64 MiB" in line and "GPU" in line for line in lines)


def test_without_gpus_up_offers_simulated_ones(tmp_path: Path) -> None:
    done = run(tmp_path, "up", "--pool", str(POOL), "--metrics", "off")
    if done.returncode == 0:
        pytest.skip("this machine has GPUs")
    assert done.returncode == 1
    assert "--driver sim" in done.stderr


def bad(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    return str(path)


HEAD = "apiVersion: ema.dev/v1alpha1\nkind: MemoryPool\nmetadata: {name: p}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "spec: {chunkSize: 4GB}", "spec.chunkSize: got '4GB'"),
        (HEAD + "spec: {lending: {headroom: -1}}", "spec.lending.headroom: got -1"),
        (HEAD + "spec: {lending: {maxPerGPU: 50 %}}", "spec.lending.maxPerGPU: got '50 %'"),
        (HEAD + "spec: {lending: {maxPerGPU: ''}}", "spec.lending.maxPerGPU: got ''"),
        (HEAD + "spec: {reclaim: {spillTo: [Disk]}}", "spec.reclaim.spillTo[0]: got 'Disk'; expected one of Peer"),
        (HEAD + "spec: {lendng: {}}", "spec.lendng: got {}; expected no such field"),
        (HEAD + "spec: {chunkSize: 3k}", "spec.chunkSize: got 3000"),
        ("", "expected at least one MemoryPool"),
        ("a: [", "a YAML document"),
        ("\x00", "a YAML document"),
        ("gpus: [{count: 2}]", "got 'simulated GPUs'; expected a MemoryPool; `ema up --driver sim --sim FILE` reads"),
    ],
)
def test_a_wrong_pool_is_refused_by_check_and_by_up(tmp_path: Path, text: str, says: str) -> None:
    path = bad(tmp_path, text)
    folder = ["--folder", str(tmp_path / "run")]
    for words in (["check", path], ["up", "--pool", path, "--driver", "sim", "--metrics", "off", *folder]):
        assert says in refused(*words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--driver", "opencl"], "--driver: got 'opencl'; expected sim or cuda"),
        (["--driver", "sim", "--metrics", "nine"], "--metrics: got 'nine'; expected ADDRESS:PORT"),
        (["--driver", "sim", "--metrics", "127.0.0.1:99999"], "--metrics: got"),
        (["--driver", "sim", "--socket-mode", "777"], "--socket-mode: got '777'; expected 600, 660 or 666"),
        (["--driver", "sim", "--sim", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--driver", "cuda", "--sim", str(SIM)], "--sim: got"),
        (["--driver", "sim", "--folder", "/proc/nothing"], "folder: got"),
    ],
)
def test_wrong_options_of_up_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setenv("EMA_RUNTIME_DIR", str(tmp_path / "run"))
    assert says in refused("up", "--pool", str(POOL), *words)


def test_a_chunk_that_does_not_fit_the_devices_is_refused(tmp_path: Path) -> None:
    path = bad(tmp_path, HEAD + "spec: {chunkSize: 64Ki}")
    done = run(tmp_path / "run", "up", "--pool", path, "--driver", "sim", "--sim", str(SIM), "--metrics", "off")
    assert done.returncode == 2
    assert "spec.chunkSize: got 65536; expected a multiple of 2097152 bytes" in done.stderr


def test_a_gpu_that_is_not_there_cannot_be_drained(up: Node) -> None:
    done = run(up.folder, "drain", "9")
    assert done.returncode == 2
    assert "gpu: got '9'; expected one of 0, 1, 2, 3 or a UUID" in done.stderr


def test_check_warns_of_an_implausible_scale(tmp_path: Path) -> None:
    path = bad(tmp_path, HEAD + "spec: {borrowing: {maxPerPod: 1}}")
    result = CliRunner().invoke(app, ["check", path])
    assert result.exit_code == 0
    assert "borrowing.maxPerPod: 1 is implausible" in result.stdout
