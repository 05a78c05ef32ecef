"""`python -m ema_driver.sim.server FOLDER`: serve the configuration on standard input, in the background.

The command itself returns when the device process can be connected to: exit status 0, or 3 where another device
process has the folder.
"""

import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from ema_driver.sim import linux
from ema_driver.sim.config import SimConfig
from ema_driver.sim.server.loop import Loop, now
from ema_driver.sim.server.machine import Machine
from ema_driver.sim.server.sessions import Session

SOCKET, LOCK, LOG = "sim.sock", "sim.lock", "sim.log"
FOLDER_TAKEN = 3
_PAUSE_NS = 50_000_000


class Server:
    """Accepts sessions; ends when the last one has been gone for a while."""

    def __init__(self, config: SimConfig, listener: socket.socket) -> None:
        self._loop = Loop()
        self._machine = Machine(config, self._loop)
        self._listener = listener
        self._linger = int(config.linger * 1e9)
        self._epoch = 0
        self._loop.watch(listener.fileno(), self._accept)
        self._ended(None)

    def run(self) -> None:
        """Until nobody needs it any more."""
        self._loop.run()

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # the caller has gone already, or descriptors are short: looking again at once would spin
            self._loop.forget(self._listener.fileno())
            self._loop.call_at(now() + _PAUSE_NS, lambda: self._loop.watch(self._listener.fileno(), self._accept))
            return
        Session(self._machine, link, None, self._ended)

    def _ended(self, _session: Session | None) -> None:
        if self._machine.tenants:
            return
        self._epoch += 1
        epoch = self._epoch

        def leave() -> None:
            if epoch == self._epoch and not self._machine.tenants:
                self._loop.stop()

        self._loop.call_at(now() + self._linger, leave)


def listen(folder: Path) -> socket.socket:
    """The listening socket; a stale one of a dead process is replaced."""
    (folder / SOCKET).unlink(missing_ok=True)
    name, held = linux.reach(str(folder / SOCKET))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen(128)
    listener.setblocking(False)
    if held >= 0:
        os.close(held)
    return listener


def detach(folder: Path) -> None:
    """Go into the background; whoever started us sees exit status 0."""
    if os.fork():
        os._exit(0)
    os.setsid()
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def main() -> int:
    """Serve until the last session has ended."""
    folder = Path(sys.argv[1])
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=SimConfig)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return FOLDER_TAKEN
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = listen(folder)
    detach(folder)
    # Ctrl-C in a terminal is for the programs in it; this process goes when its sessions are gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    sys.setswitchinterval(0.0002)  # workers must not keep the loop waiting for the interpreter
    Server(config, listener).run()
    (folder / SOCKET).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
