"""What 1,000 leases cost the agent: resident memory, time to connect, plans, and the processor at rest.

    python bench/memory.py [--no-save]

Each client is a connection that speaks the wire protocol and borrows a region of one chunk; a few processes hold them.
"""

import multiprocessing
import os
import resource
import socket
import sys
import time
from multiprocessing.connection import Connection

from ema_core import wire
from record import Row, at_most, finish, plain, record
from server import Server, cpu_seconds, resident

LEASES = 1000
PROCESSES = 4
CHUNK = 4096
GPUS = 8
BORROWING = 4
"""The first of them have the clients; nobody runs on the others, so they lend."""
REST = 5.0
"""Seconds of rest that are looked at."""


def receive(sock: socket.socket) -> wire.AgentMessage:
    """The next message; descriptors beside it are closed."""
    packet, fds, _, _ = socket.recv_fds(sock, wire.MAX_MESSAGE, wire.MAX_DESCRIPTORS)
    for fd in fds:
        os.close(fd)
    return wire.decode_agent(packet)


def borrow(path: str, first: int, count: int, line: Connection) -> None:
    """Connect `count` clients, borrow a chunk each, and stay until told to end."""
    socks = []
    for number in range(first, first + count):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(path)
        sock.send(wire.encode(wire.Hello(wire.VERSION, gpu=str(number % BORROWING), name=f"client-{number}")))
        welcome = receive(sock)
        assert isinstance(welcome, wire.Welcome), welcome
        sock.send(wire.encode(wire.GrowRegion(1, 0, CHUNK, droppable=False, timeout=30.0)))
        while isinstance(answer := receive(sock), wire.Queued):
            pass
        assert isinstance(answer, wire.Done), answer
        socks.append(sock)
    line.send(count)
    line.recv()
    for sock in socks:
        sock.close()


def rest(server: Server) -> float:
    """Cores that the agent uses while nothing happens."""
    time.sleep(2.0)  # what came before settles: twins are made, holds end
    before, began = cpu_seconds(server.pid), time.monotonic()
    time.sleep(REST)
    return (cpu_seconds(server.pid) - before) / (time.monotonic() - began)


def main() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sim = {
        "gpus": [{"count": GPUS, "memory": 64 << 20}],
        "granularity": CHUNK,
        "hostMemory": 256 << 20,
        "linkDelays": False,
    }
    pool = {
        "chunkSize": CHUNK,
        "lending": {"maxPerGPU": "50%", "headroom": 4 << 20, "hysteresis": 0},
        "reclaim": {"hostMemory": 64 << 20, "minHold": "1s"},
    }
    context = multiprocessing.get_context("spawn")
    with Server(sim, pool) as server:
        empty, quiet = resident(server.pid), rest(server)
        before = server.status()["counted"]
        clients = []
        began = time.perf_counter()
        for n in range(PROCESSES):
            line, there = context.Pipe()
            share = LEASES // PROCESSES
            clients.append((context.Process(target=borrow, args=(server.socket, n * share, share, there)), line))
            clients[-1][0].start()
        for _, line in clients:
            line.recv()
        connecting = time.perf_counter() - began
        after = server.status()["counted"]
        plans = after["plans"] - before["plans"]
        planning = (after["plan_seconds"] - before["plan_seconds"]) / max(1, plans)
        assert server.status()["leases"] == LEASES
        full, busy = resident(server.pid), rest(server)
        last = server.status()["counted"]
        began = time.perf_counter()
        for process, line in clients:
            line.send("end")
            process.join()
        while server.status()["leases"]:
            time.sleep(0.05)
        ending = time.perf_counter() - began
        left = sum(g["lent"] for g in server.status()["gpus"])
    rows: list[Row] = [
        plain("resident memory, no lease", empty / 2**20, "MiB"),
        at_most(120, f"resident memory, {LEASES} leases", full / 2**20, "MiB"),
        at_most(5, "processor at rest, no lease", quiet * 100, "% of a core"),
        at_most(5, f"processor at rest, {LEASES} leases", busy * 100, "% of a core"),
        plain(f"until {LEASES} clients have connected and borrowed", connecting, "s"),
        plain("plans made meanwhile", plans, ""),
        plain("time of one of these plans, mean", planning * 1e3, "ms"),
        plain(f"plans made in the {REST + 2:g} s after", last["plans"] - after["plans"], ""),
        plain("until all had been given back after they left", ending, "s"),
        at_most(0, "bytes lent at the end", left, "B"),
        plain("processes that wanted a core at the end (load average)", os.getloadavg()[0], ""),
    ]
    return finish(record("memory", f"The agent beside {LEASES} leases", rows))


if __name__ == "__main__":
    sys.exit(main())
