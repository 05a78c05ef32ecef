"""`ema up` as a process: killed, started again, ended in good order."""

import gc
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ema
from ema_driver.sim import SimDriver
from nodes import KIB, MIB, Borrower, pattern, processes, until
from regions import right, stored
from up import Up

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


@pytest.fixture
def up(folder: Path) -> Iterator[Up]:
    with Up(folder, POOL, SIM) as it:
        yield it
    until(lambda: not processes(str(folder)), saying="no process is left, the simulated devices included")


def connect(up: Up, gpu: int) -> ema.Pool:
    return ema.connect(up.socket, gpu=gpu)


def ask(up: Up, do: str) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(up.run / "admin.sock"))
        line.sendall(json.dumps({"do": do}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(line.makefile().readline())
        return answer


def test_after_a_crash_a_new_agent_clears_what_was_lent_and_clients_borrow_again(up: Up) -> None:
    with connect(up, 0) as client, SimDriver.connect(up.run / "sim.sock") as observer:
        share = client.share(2 * MIB)
        share.grow(2 * MIB)
        share.page(0)[:4] = b"mine"
        window = client.window(2, CHUNK)
        region = stored(client, 3 * MIB)
        program = client.program([region.step(window[0])])
        up.kill()
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
        until(lambda: ask(up, "leases")["leases"][0]["share"] == 2 * MIB)
        share.grow(2 * MIB)
        share.close()
    until(lambda: ask(up, "status")["leases"] == 0)
    gc.collect()  # frames of the errors above show the client's memory
    until(lambda: all(g["free"] == 15 * MIB for g in ask(up, "status")["gpus"]))


def test_a_client_that_died_with_the_agent_leaves_nothing(up: Up) -> None:
    gpu = ask(up, "status")["gpus"][0]["id"]
    borrower = Borrower(up.socket, gpu)
    borrower.ask("region", 3 * MIB)
    borrower.ask("fill", 0, 1)
    borrower.ask("run", 0, 1)
    up.kill()
    borrower.kill()
    up.start()
    until(lambda: ask(up, "status")["ready"])
    status = ask(up, "status")
    assert status["leases"] == 0
    assert [g["free"] for g in status["gpus"]] == [15 * MIB] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(up: Up, number: signal.Signals) -> None:
    with connect(up, 0) as client:
        region = stored(client, 3 * MIB)
        assert up.end(number) == 0
        assert not (up.run / "client.sock").exists()
        assert not (up.run / "admin.sock").exists()
        until(lambda: not client.alive)
        with pytest.raises(ema.AgentLost):
            region.gone()


def test_a_second_agent_in_the_same_folder_is_refused(up: Up) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with 1: .*an agent runs in"):
        up.start()
    assert ask(up, "status")["ready"]


def test_an_agent_whose_devices_are_gone_says_so_and_ends(up: Up) -> None:
    device = next(p for p in processes("ema_driver.sim.server") if str(up.run) in _command(p))
    os.kill(device, signal.SIGKILL)
    assert up.process.wait(15) == 1
    assert "driver session is lost" in " ".join(up.log.read_text().split())


def _command(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()
