"""The simulated server: an agent in a process of its own, started as `ema up --driver sim` starts it.

Everything of it lives in one temporary folder, and nothing of it is left when it is closed.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from ema_cli.demo.stop import undivided
from ema_cli.node import Agent
from ema_core import places
from ema_core.ids import Place
from ema_driver.sim import SimDriver
from ema_driver.sim.start import SOCKET

_UP: Final = "from ema_cli.main import run; run()"
_START: Final = 20.0
"""Real seconds that an agent may take to be ready."""
_END: Final = 15.0
_LOOK: Final = 0.02


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


class Server:
    """A running agent with its simulated GPUs."""

    def __init__(self, pool: Mapping[str, object], sim: Mapping[str, object]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ema-demo-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: Agent | None = None
        self._driver: SimDriver | None = None
        self._log = self.folder / "agent.log"
        try:
            self._start(pool, sim)
        except BaseException:
            self.close()
            raise

    @property
    def socket(self) -> str:
        """Where clients connect."""
        return str(self.folder / places.CLIENT_SOCKET)

    def free(self) -> dict[Place, int]:
        """Free real bytes of every GPU, as the driver shows them."""
        if self._driver is None:
            raise DemoFailed("the simulated GPUs are gone")
        return {place: info.free for place, info in self._driver.memory().items() if place.startswith("GPU")}

    def ask(self, do: str) -> dict[str, Any]:
        """What the agent says to `status` or `leases`. Raises DemoFailed if it has ended."""
        if self._process is None or self._admin is None or self._process.poll() is not None:
            raise DemoFailed(f"the agent has ended: {self._said()}")
        return self._admin.ask(do)

    def close(self) -> None:
        """End the agent and the GPUs, and remove their folder. Twice is harmless."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._process is not None:
            _end(self._process)
            self._process = None
        try:
            driver = self._driver or SimDriver.connect(self.folder / SOCKET)
        except OSError:
            pass  # no device process was started, or it has ended
        else:
            self._driver = None
            driver.shutdown()
            self._until_gone(self.folder / SOCKET)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, pool: Mapping[str, object], sim: Mapping[str, object]) -> None:
        # JSON is YAML.
        (self.folder / "pool.yaml").write_text(json.dumps(pool), "utf-8")
        (self.folder / "sim.yaml").write_text(json.dumps(sim), "utf-8")
        command = [sys.executable, "-c", _UP, "up", "--driver", "sim", "--metrics", "off"]
        command += ["--pool", str(self.folder / "pool.yaml"), "--sim", str(self.folder / "sim.yaml")]
        command += ["--folder", str(self.folder)]
        with self._log.open("wb") as log, undivided():
            # A session of its own: Ctrl-C reaches the demo alone, which ends the rest in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START
        while b"Ready." not in self._log.read_bytes():
            if self._process.poll() is not None:
                raise DemoFailed(f"the agent did not start: {self._said()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"the agent was not ready after {_START:g} s: {self._said()}")
            time.sleep(_LOOK)
        self._admin = Agent(self.folder)
        self._driver = SimDriver.connect(self.folder / SOCKET)

    def _said(self) -> str:
        return self._log.read_text("utf-8", errors="replace").strip()[-2000:] or "it said nothing"

    @staticmethod
    def _until_gone(path: Path) -> None:
        deadline = time.monotonic() + _END
        while path.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
