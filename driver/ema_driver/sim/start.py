"""Start a device process, or find the one that runs."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ema_driver.errors import DriverUnavailable, InvalidUse
from ema_driver.sim.config import SimConfig
from ema_driver.sim.session import SimDriver

SOCKET = "sim.sock"
_FOLDER_TAKEN = 3
_PATIENCE = 10.0
"""Seconds."""


class SimServer:
    """A running device process. It stays at least as long as this object is open."""

    def __init__(self, socket: Path, session: SimDriver) -> None:
        self.socket = socket
        """What `SimDriver.connect` takes."""
        self._session = session

    def stop(self) -> None:
        """End the device process now, whoever still uses it."""
        self._session.shutdown()

    def close(self) -> None:
        """Leave the device process to its other sessions: it ends when the last of them has."""
        self._session.close()


def start(config: SimConfig, folder: Path) -> SimServer:
    """A device process for `config` in `folder`, which must exist and should be private.

    One that runs there already is used. Raises InvalidUse if it simulates something else, DriverUnavailable if none
    can be started.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            session = SimDriver.connect(folder / SOCKET)
        except OSError:
            _spawn(config, folder)
            if time.monotonic() > deadline:
                raise DriverUnavailable(f"{folder}: another device process is there and does not answer") from None
            continue
        if session.config != config:
            session.close()
            raise InvalidUse(f"{folder}: a device process with another configuration runs there: {session.config}")
        return SimServer(folder / SOCKET, session)


def _spawn(config: SimConfig, folder: Path) -> None:
    command = [sys.executable, "-m", "ema_driver.sim.server", str(folder)]
    done = subprocess.run(command, input=msgspec.json.encode(config), capture_output=True, check=False)  # noqa: S603
    if done.returncode == _FOLDER_TAKEN:
        time.sleep(0.02)  # it is about to listen, or to end; neither can be waited for
    elif done.returncode:
        raise DriverUnavailable(f"the device process did not start: {done.stderr.decode(errors='replace').strip()}")
