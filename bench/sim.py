"""How fast the simulated driver is: launches, link rates, calls. Prints, and keeps JSON in `bench/results/sim.json`.

python bench/sim.py [--no-save]
"""

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ema_core.ids import HOST, GpuId
from ema_driver.protocol import Address, Copy, MemoryDriver, Op, Wait, Write
from ema_driver.sim import GpuGroup, SimConfig, SimDriver, SimServer, start
from record import Row, at_least, finish, plain, record

WHAT = "The simulated driver: launches, link rates, calls"
MIB = 1 << 20
SESSIONS, COPIES, CHUNK = 8, 8, 4096


def cpu_seconds(folder: Path) -> float:
    """User and system time of the device process that locks `folder`."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            command = (stat.parent / "cmdline").read_bytes().split(b"\0")
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if os.fsencode(folder) in command and b"ema_driver.sim.server" in command:
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit(f"no device process for {folder}")


def mapped(driver: MemoryDriver, place: GpuId | str, size: int) -> Address:
    address = driver.reserve(size)
    driver.map([(address, driver.create(GpuId(place), size))])  # type: ignore[arg-type]
    return address


def launches(server: SimServer, folder: Path) -> dict[str, float]:
    """8 sessions, programs of 8 gated copies of 4 KiB, slots answered at once by the streams' own last operation."""
    sessions = [SimDriver.connect(server.socket) for _ in range(SESSIONS)]
    work = []
    for driver in sessions:
        gpus = [device.id for device in driver.devices()]
        private, shared = driver.words(COPIES * 2), driver.words(COPIES * 2)
        private.fill(range(0, COPIES * 2, 2), 1)
        slots, chunks = mapped(driver, gpus[0], COPIES * CHUNK), mapped(driver, gpus[1], COPIES * CHUNK)
        ops: list[Op] = []
        for i in range(COPIES):
            gate, busy = 2 * i, 2 * i + 1
            ops += [Wait(shared, 2 * i, 0), Wait(private, gate, 1), Write(private, busy, 1), Wait(private, gate, 1)]
            ops += [Copy(slots + i * CHUNK, chunks + i * CHUNK, CHUNK), Write(private, busy, 0)]
            ops += [Write(shared, 2 * i + 1, i), Write(shared, 2 * i, 0)]
        stream = driver.stream(gpus[0])
        work.append((stream, stream.instantiate(ops)))
    rounds = 300
    before, began = cpu_seconds(folder), time.perf_counter()
    sending = 0.0
    for done in range(rounds):
        sent = time.perf_counter()
        for _, graph in work:
            graph.launch()
        sending += time.perf_counter() - sent
        if done % 20 == 19:
            for stream, _ in work:
                assert stream.synchronize(10)
    for stream, _ in work:
        assert stream.synchronize(10)
    took, cpu = time.perf_counter() - began, cpu_seconds(folder) - before
    total = rounds * SESSIONS
    for driver in sessions:
        driver.close()
    return {
        "launches_per_second": round(total / took),
        "server_us_per_launch": round(cpu / total * 1e6, 1),
        "server_us_per_operation": round(cpu / total / (COPIES * 8) * 1e6, 2),
        "server_core_share_at_1500_per_second": round(cpu / total * 1500, 3),
        "caller_us_per_launch": round(sending / total * 1e6, 1),
    }


def link_rates(server: SimServer) -> dict[str, float]:
    """Large copies, in shares of the modelled rate."""
    result = {}
    with SimDriver.connect(server.socket) as driver:
        gpus = [device.id for device in driver.devices()]
        rates = {(link.source, link.target): link.rate for link in driver.links()}
        for name, source in (("nvlink", gpus[1]), ("pcie", HOST)):
            for size in (MIB, 16 * MIB, 64 * MIB):
                of, to = mapped(driver, source, size), mapped(driver, gpus[0], size)
                stream = driver.stream(gpus[0])
                stream.enqueue([Copy(to, of, size)])
                assert stream.synchronize(20)  # pages of both sides exist from here on
                count = max(4, 256 * MIB // size)
                began = time.perf_counter()
                stream.enqueue([Copy(to, of, size)] * count)
                assert stream.synchronize(60)
                rate = size * count / (time.perf_counter() - began)
                result[f"{name}_{size // MIB}MiB"] = round(rate / rates[source, gpus[0]], 3)
    return result


def calls(server: SimServer) -> dict[str, float]:
    """256 allocations of 1 MiB; medians of 5, in milliseconds."""
    count = 256
    times: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    with SimDriver.connect(server.socket) as driver:
        gpu = driver.devices()[0].id
        base = driver.reserve(MIB * count)
        addresses = [Address(base + i * MIB) for i in range(count)]
        for _ in range(5):
            began = time.perf_counter()
            handles = [driver.create(gpu, MIB) for _ in range(count)]
            times.setdefault("create_each", []).append((time.perf_counter() - began) * 1e3 / count)
            pairs = list(zip(addresses, handles, strict=True))
            measure("map_256", lambda pairs=pairs: driver.map(pairs))  # type: ignore[misc]
            driver.write(base, b"x" * (32 * MIB))
            measure("unmap_256", lambda: driver.unmap(addresses))
            measure("release_256", lambda handles=handles: driver.release(handles))  # type: ignore[misc]
            measure("memory", driver.memory)
    return {name: round(sorted(values)[len(values) // 2], 3) for name, values in times.items()}


def memcpy(server: SimServer) -> dict[str, float]:
    """Large copies without link delays, in shares of what this process copies between the same memory."""
    result = {}
    with SimDriver.connect(server.socket) as driver:
        gpus = [device.id for device in driver.devices()]
        for size in (MIB, 16 * MIB, 64 * MIB):
            of, to = mapped(driver, gpus[1], size), mapped(driver, gpus[0], size)
            views = [driver.view(of, size), driver.view(to, size)]
            source, target = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views)
            stream = driver.stream(gpus[0])
            count = 512 * MIB // size
            shares = []
            for _ in range(3):
                stream.enqueue([Copy(to, of, size)] * 2)
                assert stream.synchronize(20)
                began = time.perf_counter()
                stream.enqueue([Copy(to, of, size)] * count)
                assert stream.synchronize(60)
                simulated = time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(count):
                    ctypes.memmove(target, source, size)
                shares.append((time.perf_counter() - began) / simulated)
            result[f"{size // MIB}MiB"] = round(sorted(shares)[1], 3)
    return result


def waiting(server: SimServer, folder: Path) -> dict[str, float]:
    """What 41 blocked streams cost, and how long a stream that answers a word takes."""
    with SimDriver.connect(server.socket) as driver:
        gpu = driver.devices()[0].id
        page = driver.words(64)
        for i in range(41):
            driver.stream(gpu).enqueue([Wait(page, i, 1)])
        before = cpu_seconds(folder)
        time.sleep(2)
        idle = (cpu_seconds(folder) - before) / 2
        stream = driver.stream(gpu)
        rounds = 500
        stream.enqueue([op for i in range(rounds) for op in (Wait(page, 50, i + 1), Write(page, 51, i + 1))])
        times = []
        for i in range(rounds):
            began = time.perf_counter()
            page.store(50, i + 1)
            assert page.wait(51, i + 1, 5)
            times.append((time.perf_counter() - began) * 1e6)
        times.sort()
    return {
        "core_share_of_41_blocked_streams": round(idle, 4),
        "answer_us_p50": round(times[rounds // 2]),
        "answer_us_p99": round(times[rounds * 99 // 100]),
    }


def rows(results: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Every figure; those of copies have a goal."""
    words = {"launches": "launches", "waiting": "waiting", "calls_ms": "256 allocations of 1 MiB, ms"}
    found = [plain(f"{words[key]}: {name}", value, "") for key in words for name, value in results[key].items()]
    for name, share in results["share_of_memcpy"].items():
        found.append(plain(f"copies of {name} without link delays", share, "of memcpy"))
    for name, share in results["share_of_modelled_rate"].items():
        link, size = name.split("_")
        found.append(at_least(0.95, f"copies of {size} over {link}", share, "of the link's rate"))
    return found


def main() -> int:
    gpus = (GpuGroup(count=4, memory=512 * MIB),)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        fast = start(SimConfig(gpus=gpus, granularity=4096, link_delays=False), Path(first))
        results["launches"] = launches(fast, Path(first))
        results["waiting"] = waiting(fast, Path(first))
        results["share_of_memcpy"] = memcpy(fast)
        results["calls_ms"] = calls(fast)
        fast.stop()
        paced = SimConfig(gpus=gpus, granularity=MIB, nvlink_rate=3_000_000_000, pcie_rate=1_000_000_000)
        slow = start(paced, Path(second))
        results["share_of_modelled_rate"] = link_rates(slow)
        slow.stop()
    return finish(record("sim", WHAT, rows(results)))


if __name__ == "__main__":
    sys.exit(main())
