"""An agent for a benchmark: `ema up` in a process of its own, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ema_cli.node import Agent
from ema_core import places

START = 30.0
"""Seconds."""


class Server:
    """A running agent. A context manager that leaves nothing behind."""

    def __init__(self, sim: Mapping[str, Any] | None, spec: Mapping[str, Any], *more: str) -> None:
        """`sim` is what sim.yaml holds, None for real GPUs; `spec` is the spec of the one pool; `more` are options."""
        self._home = tempfile.TemporaryDirectory(prefix="ema-bench-")
        self.folder = Path(self._home.name)
        pool = {"apiVersion": "ema.dev/v1alpha1", "kind": "MemoryPool", "metadata": {"name": "bench"}, "spec": spec}
        # JSON is YAML.
        (self.folder / "pool.yaml").write_text(json.dumps(pool))
        command = [sys.executable, "-c", "from ema_cli.main import run; run()", "up"]
        command += ["--pool", str(self.folder / "pool.yaml"), "--folder", str(self.folder), "--metrics", "127.0.0.1:0"]
        command += more
        if sim is None:
            command += ["--driver", "cuda"]
        else:
            (self.folder / "sim.yaml").write_text(json.dumps(dict(sim)))
            command += ["--driver", "sim", "--sim", str(self.folder / "sim.yaml")]
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.admin = self._wait()

    def _wait(self) -> Agent:
        end = time.monotonic() + START
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise SystemExit(f"the agent did not start:\n{(self.folder / 'log').read_text()}")
            if (self.folder / places.ADMIN_SOCKET).exists():
                admin = Agent(self.folder)
                if admin.ask("status")["ready"]:
                    return admin
                admin.close()
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """The agent's process."""
        return self._process.pid

    @property
    def socket(self) -> str:
        """What `ema.connect` takes."""
        return str(self.folder / places.CLIENT_SOCKET)

    @property
    def device_socket(self) -> Path:
        """Where the device process answers."""
        return self.folder / "sim.sock"

    def status(self) -> dict[str, Any]:
        """What `ema status --json` prints."""
        return self.admin.ask("status")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write((self.folder / "log").read_text("utf-8", "replace"))
        self.admin.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._home.cleanup()


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of memory that a process has resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has ended")
