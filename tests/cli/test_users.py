"""One agent and several users of the machine: who may connect, where its sockets are, what is said to who may not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import ema
from up import EMA

POOL = """
apiVersion: ema.dev/v1alpha1
kind: MemoryPool
metadata: {name: shared}
spec:
  chunkSize: 256Ki
  lending: {maxPerGPU: 90%, headroom: 2Mi, hysteresis: "0"}
  reclaim: {hostMemory: 64Mi, minHold: 0s}
"""
SIM = "gpus: [{count: 3, memory: 16Mi}]\nhostMemory: 256Mi\ngranularity: 64Ki\n"
BORROW = """
import sys, ema
with ema.connect() as pool:
    region = pool.region(pool.chunk)
    found = bytearray(9)
    region.store(b"of a user", at=0)
    region.fetch(0, into=found)
    print(found.decode())
    sys.stdin.read()
"""


OURS = [p for p in sys.path if p and not Path(p).is_relative_to(sys.base_prefix)]
"""Where packages are, but for Python's own."""


def become(uid: int) -> list[str]:
    """Start of a command that runs as another user."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def environ(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EMA_", "XDG_")) and k != "HOME"}
    return {**kept, "HOME": "/nonexistent", "PYTHONPATH": os.pathsep.join(OURS), **more}


@cache
def python() -> str:
    """A Python that another user can run with this checkout, since this one may be in root's home; "" if none is."""
    for found in (sys.executable, "/usr/bin/python{}.{}".format(*sys.version_info)):
        code = "import sys, os, ema_cli.main, ema; sys.exit(not os.access(sys.executable, os.X_OK))"
        command = [*become(1001), found, "-c", code]
        if subprocess.run(command, env=environ(), capture_output=True, check=False, cwd="/").returncode == 0:
            return found
    return ""


pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None or not python(),
    reason="needs root and setpriv, to become other users, and a Python and a checkout that these can read",
)


def child(code: str, uid: int, env: Mapping[str, str], *arguments: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    start = [*become(uid), python()] if uid else [sys.executable]
    command = [*start, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "pool.yaml").write_text(POOL)
        (folder / "sim.yaml").write_text(SIM)
        yield folder


@contextmanager
def up(place: Path, uid: int, env: Mapping[str, str], *options: str) -> Iterator[list[str]]:
    """`ema up` of a user; what it says until it is ready."""
    files = ["--pool", str(place / "pool.yaml"), "--driver", "sim", "--sim", str(place / "sim.yaml")]
    process = child(EMA, uid, env, "up", *files, *options)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ready"):
                break
        else:
            raise AssertionError(process.communicate())
        yield said
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_two_users_borrow_from_one_agent_at_once(place: Path) -> None:
    run = place / "run"
    with up(place, 0, environ(), "--folder", str(run), "--metrics", "off", "--socket-mode", "666"):
        users = [
            child(BORROW, uid, environ(EMA_SOCKET=str(run / "client.sock"), EMA_GPU=str(gpu)))
            for gpu, uid in enumerate((1001, 1002))
        ]
        try:
            for user in users:
                assert user.stdout is not None
                assert user.stdout.readline() == "of a user\n", user.communicate()
        finally:
            for user in users:
                user.communicate()


def test_who_may_not_connect_is_told_why(place: Path) -> None:
    run = place / "run"
    with up(place, 0, environ(), "--folder", str(run), "--metrics", "off"):
        user = child(BORROW, 1001, environ(EMA_SOCKET=str(run / "client.sock"), EMA_GPU="0"))
        _, error = user.communicate()
        assert user.returncode
        assert "AgentLost" in error
        assert "ermission" in error
        assert str(run) in error
        status = child(EMA, 1001, environ(), "status", "--folder", str(run))
        output = "".join(status.communicate())
        assert status.returncode
        assert "another user's" in output


@pytest.mark.parametrize("own", [True, False], ids=["with a runtime folder", "without"])
def test_the_agent_of_a_user_is_found_without_being_told(place: Path, own: bool) -> None:
    uid = 1001
    runtime = place / "runtime"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, uid, uid)
    env = environ(XDG_RUNTIME_DIR=str(runtime)) if own else environ()
    expected = runtime / "ema" if own else Path(f"/tmp/ema-{uid}")
    try:
        with up(place, uid, env, "--metrics", "off"):
            assert expected.stat().st_uid == uid
            assert expected.stat().st_mode & 0o022 == 0
            status = child(EMA, uid, env, "status", "--json")
            output, error = status.communicate()
            assert not error
            assert len(json.loads(output)["gpus"]) == 3
            borrower = child(BORROW, uid, {**env, "EMA_GPU": "0"})
            assert borrower.communicate("")[0] == "of a user\n"
    finally:
        if not own:
            shutil.rmtree(expected, ignore_errors=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_prometheus_accepts_the_metrics_of_a_busy_agent(place: Path) -> None:
    run = place / "run"
    with up(place, 0, environ(), "--folder", str(run), "--metrics", "127.0.0.1:0") as said:
        page = next(line.split()[1] for line in said if line.startswith("Metrics:"))
        with ema.connect(str(run / "client.sock"), gpu=0) as pool:
            region = pool.region(4 * pool.chunk)
            region.store(bytes(region.size), at=0)
            for _ in range(3):
                region.fetch(0, into=bytearray(region.size))
            with urllib.request.urlopen(page, timeout=5) as answer:
                text = answer.read()
        assert b"ema_" in text
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)  # noqa: S607
        assert (done.returncode, done.stderr.decode()) == (0, ""), textwrap.shorten(done.stderr.decode(), 2000)
