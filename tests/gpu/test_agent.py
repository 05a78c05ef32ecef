"""The agent on a real GPU: `ema up --driver cuda` lends host memory to a borrower in another process."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ema_driver.protocol import MemoryDriver
from real import agent

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BORROWER = Path(__file__).parent / "borrower.py"
Record = Callable[[str, object], None]


ELSEWHERE = [
    *("unshare", "--pid", "--ipc", "--mount", "--uts", "--net", "--fork", "--mount-proc"),
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"),
]
"""As in a container: namespaces of its own, nobody's user, no capability."""


def borrower(socket: str, rounds: int, *more: str, where: Sequence[str] = ()) -> "subprocess.Popen[str]":
    command = [*where, sys.executable, str(BORROWER), socket, str(rounds), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def leases(folder: Path) -> object:
    """What the agent still has open."""
    command = [sys.executable, "-c", "from ema_cli.main import run; run()", "leases", "--folder", str(folder), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["leases"]


def free(cuda: MemoryDriver) -> int:
    return cuda.memory()[cuda.devices()[0].id].free


def test_a_borrower_stores_and_fetches_what_the_host_lends(
    cuda: MemoryDriver, tmp_path: Path, record_property: Record
) -> None:
    before = free(cuda)
    with agent(tmp_path) as socket:
        idle = free(cuda)
        record_property("agent with its context, MiB", (before - idle) >> 20)
        with borrower(socket, 3) as client:
            output, _ = client.communicate(timeout=60)
            assert client.returncode == 0
        figures = json.loads(output.splitlines()[0])
        record_property("fetched and handed over by the GPU, GB/s", round(figures["gbs"], 2))
        assert (figures["wrong"], figures["ended"]) == (0, True)

        # One that is killed with copies queued leaves nothing behind either, and the next one is served.
        with borrower(socket, 1, "hang") as client:
            assert client.stdout is not None
            assert any("hanging" in line for line in client.stdout)
            client.kill()
        with borrower(socket, 1) as client:
            output, _ = client.communicate(timeout=60)
        assert json.loads(output.splitlines()[0])["wrong"] == 0
        began = time.monotonic()
        end = began + 8
        while free(cuda) < idle - 12 * MIB and time.monotonic() < end:
            time.sleep(0.05)
        record_property("all given back after, s", round(time.monotonic() - began, 3))
        assert free(cuda) == pytest.approx(idle, abs=12 * MIB)
        assert leases(tmp_path) == []
    assert free(cuda) == pytest.approx(before, abs=12 * MIB)


def test_a_borrower_in_a_container_is_served(cuda: MemoryDriver, record_property: Record) -> None:
    before = free(cuda)
    # Not pytest's folder, which nobody else may enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with agent(folder, "--socket-mode", "666") as socket:
            with borrower(socket, 2, where=ELSEWHERE) as client:
                output, _ = client.communicate(timeout=60)
            assert client.returncode == 0
            figures = json.loads(output.splitlines()[0])
            record_property("fetched by a borrower without capabilities, GB/s", round(figures["gbs"], 2))
            assert (figures["wrong"], figures["ended"]) == (0, True)
            assert figures["uid"] == 65534
            assert int(figures["capabilities"], 16) == 0
    assert free(cuda) == pytest.approx(before, abs=12 * MIB)
