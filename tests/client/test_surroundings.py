"""Where the library runs: light to import, without a home, without rights, behind a proxy, beside other users."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nodes import Node

STORE_AND_FETCH = """
import ema
with ema.connect(timeout=10) as pool:
    region = pool.region(3 * pool.chunk)
    data = bytes(range(256)) * 1024
    region.store(data[:region.size], at=0)
    found = bytearray(region.size)
    region.fetch(0, found)
    assert found == data[:region.size]
    print("right")
"""


def python(code: str, environ: dict[str, str], wrap: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    command = [*wrap, sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {path.split(os.pathsep)!r}\n{code}"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def environ(it: Node, gpu: int = 0, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "EMA_SOCKET": it.socket, "EMA_GPU": it.gpus[gpu], **more}


def test_importing_takes_little_time() -> None:
    code = "import time; t = time.process_time(); import ema; print(time.process_time() - t)"
    took = sorted(float(python(code, {}).stdout) for _ in range(5))
    assert took[0] < 0.150, took


def test_importing_brings_nothing_heavy() -> None:
    done = python("import sys, ema; print(*sys.modules)", {})
    roots = {m.split(".")[0] for m in done.stdout.split()}
    heavy = {"asyncio", "concurrent", "logging", "numpy", "prometheus_client", "rich", "subprocess", "typer", "yaml"}
    assert not roots & heavy
    assert not roots & {"ema_agent", "ema_cli"}


def test_a_proxy_is_not_asked(shared_node: Node) -> None:
    proxy = "http://127.0.0.1:9"
    done = python(STORE_AND_FETCH, environ(shared_node, HTTP_PROXY=proxy, HTTPS_PROXY=proxy, ALL_PROXY=proxy))
    assert (done.stdout.strip(), done.stderr) == ("right", "")


def test_several_processes_on_one_gpu(shared_node: Node) -> None:
    command = [sys.executable, "-c", STORE_AND_FETCH]
    env = environ(shared_node, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [c.communicate(timeout=60)[0].strip() for c in children] == ["right"] * 3


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user in a read-only file system")
def test_uid_1001_without_a_home_in_a_read_only_root(shared_node: Node) -> None:
    """Case: a restricted pod. The socket is open to all; nothing can be written anywhere, and HOME is not there."""
    for folder in [shared_node.folder, *shared_node.folder.parents]:
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    Path(shared_node.socket).chmod(0o666)
    code = textwrap.dedent(
        """
        import os, re, ema, ema_driver.sim.session  # this test's Python may be in root's home
        os.setgroups([]); os.setgid(1001); os.setuid(1001)
        for folder in ("/", "/tmp", os.path.expanduser("~")):
            try:
                open(os.path.join(folder, "x"), "w")
            except OSError:
                continue
            raise SystemExit(f"{folder} can be written")
        """
    )
    script = """
        set -e
        mount --make-rprivate /
        mount --bind -o ro / / && mount -o remount,bind,ro /
        mount -o remount,bind,ro /tmp 2>/dev/null || mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp
        exec "$@"
    """
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:  # noqa: S607
        pytest.skip("this root may not make mount namespaces")
    wrap = ("unshare", "-m", "sh", "-c", textwrap.dedent(script), "sh")
    done = python(code + STORE_AND_FETCH, environ(shared_node, HOME="/nonexistent"), wrap)
    assert (done.stdout.strip(), done.stderr) == ("right", "")
