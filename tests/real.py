"""An agent on real GPUs: `ema up --driver cuda` in a process of its own. One GPU is enough: the host lends."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ema_driver import open_node
from ema_driver.errors import DriverUnavailable
from ema_driver.protocol import MemoryDriver
from up import command, started

POOL = """\
apiVersion: ema.dev/v1alpha1
kind: MemoryPool
metadata: {name: real}
spec:
  chunkSize: 64Mi
  lending: {host: 2Gi, maxPerGPU: 2Gi, headroom: 512Mi, hysteresis: 128Mi}
  reclaim: {hostMemory: 4Gi}
"""


@contextmanager
def gpus() -> Iterator[MemoryDriver]:
    """A session with the real GPUs; skips the test where there are none."""
    try:
        driver = open_node("cuda", "")
    except DriverUnavailable:
        pytest.skip("no GPU")
    with driver:
        yield driver


@contextmanager
def agent(folder: Path, *more: str, pool: str = POOL) -> Iterator[str]:
    """`ema up` in a process of its own, with more options; the client socket."""
    (folder / "pool.yaml").write_text(pool, "utf-8")
    files = ["--pool", str(folder / "pool.yaml"), "--folder", str(folder)]
    log = folder / "agent.log"
    process = started(command("up", "--driver", "cuda", "--metrics", "off", *files, *more), log)
    try:
        assert "barred" not in log.read_text("utf-8"), log.read_text("utf-8")
        yield str(folder / "client.sock")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0, log.read_text("utf-8")
    finally:
        # Whatever it hangs in is then in its log.
        process.send_signal(signal.SIGABRT)
        process.wait()
        sys.stdout.write(log.read_text("utf-8"))
