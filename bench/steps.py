"""What a step costs: the client, the agent, many clients at once, and how near fetches come to the link.

    python bench/steps.py [--no-save]

The agent is a separate `ema up` on simulated GPUs, held to one core; clients are processes.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import ema
from record import Row, at_least, at_most, finish, plain, record

KIB, MIB = 1 << 10, 1 << 20
SECONDS = 5.0
POOL = """
apiVersion: ema.dev/v1alpha1
kind: MemoryPool
metadata: {name: bench}
spec:
  chunkSize: %s
  lending: {maxPerGPU: 90%%, headroom: 8Mi, hysteresis: "0"}
  reclaim: {hostMemory: 1Gi, minHold: 0s}
"""


class Up:
    """A running `ema up`."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.socket = str(folder / "client.sock")
        self.process = process

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def up(chunk: str, sim: str) -> Iterator[Up]:
    """An agent on one core."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pool.yaml").write_text(POOL % chunk)
        (folder / "sim.yaml").write_text(sim)
        files = ["--sim", str(folder / "sim.yaml"), "--pool", str(folder / "pool.yaml"), "--folder", name]
        code = "from ema_cli.main import run; run()"
        command = [sys.executable, "-c", code, "up", "--driver", "sim", "--metrics", "off", *files]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, {(os.cpu_count() or 1) - 1})
        try:
            ema.connect(str(folder / "client.sock"), gpu=0, timeout=30.0).close()
            yield Up(folder, process)
        finally:
            process.terminate()
            process.wait(30)


class Steps:
    """A program of `chunks` pieces of 4 KiB, one from each chunk, into as many slots."""

    def __init__(self, pool: ema.Pool, chunks: int) -> None:
        self.region = pool.region(chunks * pool.chunk, timeout=30.0)
        self.window = pool.window(chunks, 4 * KIB)
        self.program = pool.program([self.region.step(self.window[i], i * pool.chunk) for i in range(chunks)])

    def start(self) -> float:
        """Start a step; microseconds."""
        began = time.perf_counter_ns()
        self.program.start()
        return (time.perf_counter_ns() - began) / 1e3

    def use(self) -> None:
        """Wait for all pieces, and hand all slots back."""
        self.window[len(self.window) - 1].wait(30.0)
        for slot in self.window.slots:
            slot.release()


def client(path: str, gpu: str, seconds: float) -> int:
    """Steps of 8 pieces, the next one always queued ahead; how many were made."""
    with ema.connect(path, gpu=gpu) as pool:
        steps = Steps(pool, 8)
        print("ready", flush=True)
        sys.stdin.readline()
        end, count = time.monotonic() + seconds, 0
        steps.start()
        while time.monotonic() < end:
            steps.start()
            steps.use()
            count += 1
        return count


def one(seconds: float) -> dict[str, float]:
    """One client, 32 pieces a step, on another core than the agent: what is measured is the client."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:-1] or os.sched_getaffinity(0))
    sim = "gpus: [{count: 4, memory: 64Mi}]\ngranularity: 4Ki\nlinkDelays: false\n"
    with up("64Ki", sim) as it, ema.connect(it.socket, gpu=0) as pool:
        steps = Steps(pool, 32)
        for _ in range(50):
            steps.start()
            steps.use()
        took, before, end = [], it.cpu(), time.monotonic() + seconds
        while time.monotonic() < end:
            took.append(steps.start())  # none is under way: nothing to wait for
            steps.use()
        agent = (it.cpu() - before) / len(took)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    cuts = quantiles(took, n=100)
    return {"client_start_us_p50": cuts[49], "client_start_us_p99": cuts[98], "agent_cpu_ms": agent * 1e3}


def bare() -> float:
    """Microseconds that sending a packet to a sleeping process on another core takes: part of every start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        code = "import os,socket;s=socket.socket(fileno=%d);os.sched_setaffinity(0,{%d})\nwhile s.recv(99):s.send(b'x')"
        fd, core = theirs.fileno(), (os.cpu_count() or 1) - 1
        child = subprocess.Popen([sys.executable, "-c", code % (fd, core)], pass_fds=[fd])
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:-1] or os.sched_getaffinity(0))
        took = []
        for _ in range(2000):
            time.sleep(1e-3)
            began = time.perf_counter_ns()
            ours.send(b"12345678")
            took.append((time.perf_counter_ns() - began) / 1e3)
            ours.recv(99)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        child.kill()
        child.wait()
    return median(took)


def eight(seconds: float) -> dict[str, float]:
    """Eight processes on GPUs of their own, which borrow from a ninth; 8 pieces a step."""
    with up("64Ki", "gpus: [{count: 9, memory: 64Mi}]\ngranularity: 4Ki\nlinkDelays: false\n") as it:
        command = [sys.executable, __file__, "client", it.socket]
        children = [
            subprocess.Popen(
                [*command, str(gpu), str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for gpu in range(8)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        before = it.cpu()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        total = sum(int(child.communicate(timeout=120)[0]) for child in children)
        cpu = it.cpu() - before
    return {"steps_per_second": total / seconds, "agent_core_share": cpu / seconds, "agent_cpu_ms": cpu / total * 1e3}


def link(seconds: float) -> dict[str, float]:
    """Fetches of 4 MiB pieces at a modelled 1 GB/s, and the same without delays beside this machine's memcpy."""
    found: dict[str, float] = {}
    for name, delays in (("link", "true"), ("memcpy", "false")):
        sim = f"gpus: [{{count: 2, memory: 256Mi}}]\nnvlinkRate: 1G\nlinkDelays: {delays}\n"
        with up("4Mi", sim) as it, ema.connect(it.socket, gpu=0) as pool:
            count, size = 32, pool.chunk
            region, window = pool.region(count * size, timeout=30.0), pool.window(4, size)
            program = pool.program([region.step(window[i % 4], i * size) for i in range(count)])
            program.start()
            fetched, began = 0, 0.0
            while began == 0.0 or time.perf_counter() - began < seconds:
                program.start()
                for i in range(count):
                    window[i % 4].wait(30.0)
                    window[i % 4].release()
                if began:
                    fetched += count * size
                else:
                    began = time.perf_counter()  # the first round touches every page for the first time
            rate = fetched / (time.perf_counter() - began)
        bound = 1e9 if name == "link" else memcpy(size)
        found |= {f"{name}_bytes_per_second": rate, f"{name}_bound": bound, f"{name}_fraction": rate / bound}
    return found


def memcpy(size: int) -> float:
    """Bytes per second that this process copies between pieces of memory too large for a cache."""
    source, target = memoryview(bytearray(32 * size)), memoryview(bytearray(32 * size))
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        for i in range(0, len(source), size):
            target[i : i + size] = source[i : i + size]
        best = max(best, len(source) / (time.perf_counter() - began))
    return best


def rows() -> list[Row]:
    """Everything, in the order of the goals."""
    single, many, copies = one(SECONDS), eight(SECONDS), link(SECONDS)
    return [
        plain("a bare packet to a process that sleeps, p50", bare(), "µs"),
        at_most(30, "client: start of a step of 32 chunks, p50", single["client_start_us_p50"], "µs"),
        plain("client: start of a step of 32 chunks, p99", single["client_start_us_p99"], "µs"),
        at_most(0.3, "agent: processor time of a step of 32 chunks", single["agent_cpu_ms"], "ms"),
        at_least(1500, "8 clients, 8 chunks a step, agent on one core", many["steps_per_second"], "steps/s"),
        plain("the agent's share of that core", many["agent_core_share"], ""),
        plain("agent: processor time of a step of 8 chunks", many["agent_cpu_ms"], "ms"),
        at_least(0.95, "fetch, of the modelled 1 GB/s link", copies["link_fraction"], ""),
        plain("fetch without link delays", copies["memcpy_bytes_per_second"] / 1e9, "GB/s"),
        plain("memcpy of this machine", copies["memcpy_bound"] / 1e9, "GB/s"),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        sys.stdout.write(f"{client(sys.argv[2], sys.argv[3], float(sys.argv[4]))}\n")
    else:
        sys.exit(finish(record("steps", "What a step costs; the agent is a separate `ema up` on one core", rows())))
