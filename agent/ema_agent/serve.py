"""Start to end of one agent process: folder, driver, sockets, pages, signals."""

import asyncio
import fcntl
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ema_agent.admin import Admin
from ema_agent.agent import Agent, Setup
from ema_agent.metrics import Pages, Snapshot
from ema_agent.report import leases, status
from ema_core import places
from ema_core.api import MemoryPool
from ema_core.errors import InvalidInput
from ema_driver.protocol import MemoryDriver

PUBLISH = 1.0
"""Seconds between two snapshots for the metrics."""


@dataclass(frozen=True, slots=True)
class Options:
    """What can be chosen at start."""

    folder: Path
    client_mode: int = 0o600
    pages: tuple[str, int] | None = ("127.0.0.1", 0)
    """Address of /metrics; port 0 takes a free one, None opens none."""
    pair_limit: float = 3.0
    loopback: bool = False
    """See `Node.loopback`."""


class FolderTaken(Exception):
    """Another agent serves from this folder."""


def claim(folder: Path) -> int:
    """Make the agent's folder and lock it for this process; the lock's descriptor.

    Raises FolderTaken, or InvalidInput if the folder is somebody else's.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise InvalidInput.of("folder", str(folder), "a folder of this user's own")
    fd = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise FolderTaken(f"an agent runs in {folder} already; ask it with `ema status`, or end it first") from None
    for name in (places.CLIENT_SOCKET, places.ADMIN_SOCKET):
        (folder / name).unlink(missing_ok=True)  # what a crash left behind
    return fd


def _steady() -> None:
    """Keep the interpreter's own pauses out of reclaims.

    A thread that computes hands over after 1 ms, not 5; what lives since the start is not looked through for garbage.
    """
    sys.setswitchinterval(1e-3)
    gc.collect()
    gc.freeze()


async def serve(
    driver: MemoryDriver,
    endpoint: str,
    pools: Sequence[MemoryPool],
    options: Options,
    started: Callable[[Agent, Pages | None], None],
) -> str | None:
    """Serve until SIGINT or SIGTERM; why the driver session was lost, if it was. `started` is called when ready."""
    _steady()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client costs about nine descriptors
    setup = Setup(
        driver.name, endpoint, options.folder, options.client_mode, options.pair_limit, loopback=options.loopback
    )
    agent = Agent(driver, pools, setup)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, agent.stop)
    snapshot = Snapshot(agent.figures)
    admin = Admin(agent, options.folder / places.ADMIN_SOCKET)
    pages = Pages(*options.pages, snapshot) if options.pages is not None else None
    work = asyncio.ensure_future(agent.run())
    try:
        await admin.open()
        announced = False
        while not work.done():
            now = time.monotonic()
            snapshot.status, snapshot.leases = status(agent, now), leases(agent, now)
            if agent.ready and not announced:
                announced = True
                started(agent, pages)
            await asyncio.wait([work], timeout=PUBLISH if announced else 0.01)
        await work
    finally:
        await admin.close()
        if pages is not None:
            pages.close()
    return agent.why_ended
