"""`ema up` as a process: killed, started again, ended in good order."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ema
from ema_driver.sim import SimDriver
from nodes import KIB, MIB, Borrower, pattern, processes, until

CHUNK = 256 * KIB
POOL = """
apiVersion: ema.dev/v1alpha1
kind: MemoryPool
metadata: {name: test}
spec:
  chunkSize: 256Ki
  lending: {maxPerGPU: 90%, headroom: 2Mi, hysteresis: "0"}
  reclaim: {hostMemory: 64Mi, minHold: 0s}
"""
SIM = """
gpus: [{count: 3, memory: 16Mi, reserved: 1Mi}]
hostMemory: 256Mi
granularity: 64Ki
nvlinkRate: 4G
linger: 500ms
"""


class Up:
    """`ema up` in a folder, started as often as a test likes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pool.yaml").write_text(POOL)
        (folder / "sim.yaml").write_text(SIM)
        self.run = folder / "run"
        self.run.mkdir()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-c",
            "from ema_cli.main import run; run()",
            "up",
            "--pool",
            "pool.yaml",
            "--driver",
            "sim",
        ]
        command += ["--sim", "sim.yaml", "--folder", str(self.run), "--metrics", "off"]
        process = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.process = process
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ready"):
                return process
        raise AssertionError(f"ema up ended with {process.wait()}: {''.join(said)}")

    def ask(self, do: str) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self.run / "admin.sock"))
            line.sendall(json.dumps({"do": do}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(line.makefile().readline())
            return answer

    def connect(self, gpu: int) -> ema.Pool:
        return ema.connect(str(self.run / "client.sock"), gpu=gpu)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.fixture
def up(folder: Path) -> Iterator[Up]:
    it = Up(folder)
    try:
        it.start()
        yield it
    finally:
        it.end()
        until(lambda: not processes(str(folder)), saying="no process is left, the simulated devices included")


def stored(client: ema.Pool, size: int) -> ema.Region:
    region = client.region(size)
    region.store(pattern(7, size), at=0)
    return region


def right(region: ema.Region) -> bool:
    back = bytearray(region.size)
    region.fetch(0, back)
    return back == pattern(7, region.size)


def test_after_a_crash_a_new_agent_clears_what_was_lent_and_clients_borrow_again(up: Up) -> None:
    with up.connect(0) as client, SimDriver.connect(up.run / "sim.sock") as observer:
        share = client.share(2 * MIB)
        share.grow(2 * MIB)
        share.page(0)[:4] = b"mine"
        window = client.window(2, CHUNK)
        region = stored(client, 3 * MIB)
        program = client.program([region.step(window[0])])
        up.end()
        with pytest.raises(ema.AgentLost):
            until(lambda: right(region) and False)
        until(lambda: observer.memory()["host"].used == 0, saying="everything that was lent is free")  # type: ignore[index]
        up.start()
        until(lambda: client.alive, saying="the client has found the new agent")
        for use in (program.start, region.gone, lambda: region.fetch(0, window[0])):
            with pytest.raises(ema.AgentLost):
                use()
        assert bytes(share.page(0)[:4]) == b"mine"
        again = stored(client, 3 * MIB)
        assert right(again)
        again.fetch(0, window[1], CHUNK)
        view = window[1].wait(5)
        assert view is not None
        assert bytes(view) == pattern(7, 3 * MIB)[:CHUNK]
        del view
        window[1].release()
        until(lambda: up.ask("leases")["leases"][0]["share"] == 2 * MIB)
        share.grow(2 * MIB)
        share.close()
    until(lambda: up.ask("status")["leases"] == 0)
    gc.collect()  # frames of the errors above show the client's memory
    until(lambda: all(g["free"] == 15 * MIB for g in up.ask("status")["gpus"]))


def test_a_client_that_died_with_the_agent_leaves_nothing(up: Up) -> None:
    gpu = up.ask("status")["gpus"][0]["id"]
    borrower = Borrower(str(up.run / "client.sock"), gpu)
    borrower.ask("region", 3 * MIB)
    borrower.ask("fill", 0, 1)
    borrower.ask("run", 0, 1)
    up.end()
    borrower.kill()
    up.start()
    until(lambda: up.ask("status")["ready"])
    status = up.ask("status")
    assert status["leases"] == 0
    assert [g["free"] for g in status["gpus"]] == [15 * MIB] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(up: Up, number: signal.Signals) -> None:
    with up.connect(0) as client:
        region = stored(client, 3 * MIB)
        assert up.process is not None
        up.process.send_signal(number)
        assert up.process.wait(15) == 0
        assert not (up.run / "client.sock").exists()
        assert not (up.run / "admin.sock").exists()
        until(lambda: not client.alive)
        with pytest.raises(ema.AgentLost):
            region.gone()


def test_a_second_agent_in_the_same_folder_is_refused(up: Up) -> None:
    first = up.process
    with pytest.raises(AssertionError, match="an agent runs in"):
        up.start()
    assert up.process is not None
    assert up.process.returncode == 1
    assert up.process.stdout is not None
    up.process.stdout.close()
    up.process = first
    assert up.ask("status")["ready"]


def test_an_agent_whose_devices_are_gone_says_so_and_ends(up: Up) -> None:
    device = next(p for p in processes("ema_driver.sim.server") if str(up.run) in _command(p))
    os.kill(device, signal.SIGKILL)
    assert up.process is not None
    assert up.process.stdout is not None
    said = up.process.stdout.read()
    assert up.process.wait(15) == 1
    assert "driver session is lost" in " ".join(said.split())


def _command(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()
