"""`ema up` in a process of its own: started, killed, started again, ended in good order."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from nodes import until

EMA = "from ema_cli.main import run; run()"
POOL = """
apiVersion: ema.dev/v1alpha1
kind: MemoryPool
metadata: {name: test}
spec:
  chunkSize: 64Ki
  lending: {maxPerGPU: 90%, headroom: 64Ki, hysteresis: "0"}
  reclaim: {hostMemory: 64Mi, minHold: 0s}
"""
SIM = "gpus: [{count: 3, memory: 16Mi}]\nhostMemory: 128Mi\ngranularity: 4Ki\nlinkDelays: false\nlinger: 20s\n"


def command(*arguments: str) -> list[str]:
    """The `ema` command of this checkout."""
    return [sys.executable, "-X", "faulthandler", "-c", EMA, *arguments]


def started(words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start an agent, and wait until it serves. What it says is in `log`; fails with that if it ends instead."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        until(lambda: "Ready" in log.read_text("utf-8") or process.poll() is not None, within=30, saying="it serves")
    except AssertionError:
        process.send_signal(signal.SIGABRT)  # what it hangs in is then in its log
        process.wait()
    assert process.poll() is None, f"ema up ended with {process.returncode}: {log.read_text('utf-8')}"
    return process


class Up:
    """`ema up` on simulated GPUs, started as often as a test likes. A context manager."""

    def __init__(self, folder: Path, pool: str = POOL, sim: str = SIM) -> None:
        self.run, self.log = folder / "run", folder / "up.log"
        self.run.mkdir()
        (folder / "pool.yaml").write_text(pool)
        (folder / "sim.yaml").write_text(sim)
        files = {"--pool": folder / "pool.yaml", "--sim": folder / "sim.yaml", "--folder": self.run}
        self._files = [word for name, path in files.items() for word in (name, str(path))]
        self.start()

    @property
    def socket(self) -> str:
        """Where clients connect."""
        return str(self.run / "client.sock")

    def start(self) -> None:
        """Start an agent, and wait until it serves."""
        self.process = started(command("up", "--driver", "sim", "--metrics", "off", *self._files), self.log)

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self.process.kill()
        self.process.wait(10)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it in good order; its exit status."""
        try:
            self.process.send_signal(number)
            return self.process.wait(20)
        finally:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
