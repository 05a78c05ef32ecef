"""What the CUDA driver's calls cost on this machine: `python bench/driver.py [OUT.json]`. Needs a GPU."""

import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ema_core.ids import HOST, Place
from ema_driver import open_node
from ema_driver.protocol import Address, Copy, MemoryDriver, Op, Wait, Words, Write

MIB = 1 << 20
LAYERS = 32


def timed(work: Callable[[], object], times: int) -> dict[str, float]:
    """Median and 99th percentile, in µs."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1e6)
    took.sort()
    return {"p50_us": round(took[len(took) // 2], 1), "p99_us": round(took[int(len(took) * 0.99)], 1)}


def memory(driver: MemoryDriver, place: Place, size: int) -> dict[str, object]:
    """Create (zeroed), map, unmap, release, each measured by itself."""
    at = driver.reserve(size)
    found: dict[str, list[float]] = {"create": [], "map": [], "unmap": [], "release": []}
    for _ in range(20):
        stamps = [time.perf_counter()]
        handle = driver.create(place, size)
        stamps.append(time.perf_counter())
        driver.map([(at, handle)])
        stamps.append(time.perf_counter())
        driver.unmap([at])
        stamps.append(time.perf_counter())
        driver.release([handle])
        stamps.append(time.perf_counter())
        for name, a, b in zip(found, stamps[:-1], stamps[1:], strict=True):
            found[name].append((b - a) * 1e6)
    driver.unreserve([at])
    return {"bytes": size, **{f"{name}_us": round(sorted(t)[10], 1) for name, t in found.items()}}


def gated(shared: Words, private: Words, window: int, store: int, size: int) -> list[Op]:
    """The agent's program: 32 copies into 4 slots, each behind its gate."""
    ops: list[Op] = []
    for i in range(LAYERS):
        slot, gate = 16 * (i % 4), 16 * i
        ops += [Wait(shared, slot, 0), Wait(private, gate, 1), Write(private, gate + 1, 1), Wait(private, gate, 1)]
        ops += [Copy(window + (i % 4) * size, store + i * size, size), Write(private, gate + 1, 0)]
        ops.append(Write(shared, slot + 1, i))
    return ops


def programs(driver: MemoryDriver, size: int) -> dict[str, object]:
    """What a run of a gated program costs the agent, and the rate it reaches when no wait holds it."""
    gpu = driver.devices()[0].id
    ends: list[Address] = []
    for place, count in ((gpu, 4), (HOST, LAYERS)):
        ends.append(driver.reserve(size * count))
        driver.map([(ends[-1], driver.create(place, size * count))])
    shared, private = driver.words(1024), driver.words(1024)
    private.fill([16 * i for i in range(LAYERS)], 1)
    stream = driver.stream(gpu)
    ops = gated(shared, private, ends[0], ends[1], size)
    began = time.perf_counter()
    graph = stream.instantiate(ops)
    instantiated = (time.perf_counter() - began) * 1e6

    def run() -> None:
        graph.launch()
        stream.synchronize(10)

    run()
    launch = []
    for _ in range(200):
        stream.synchronize(10)
        began = time.perf_counter()
        graph.launch()
        launch.append((time.perf_counter() - began) * 1e6)
    stream.synchronize(10)
    launch.sort()
    began = time.perf_counter()
    for _ in range(10):
        graph.launch()
    stream.synchronize(30)
    rate = 10 * LAYERS * size / (time.perf_counter() - began)

    def run_by_calls() -> None:
        stream.enqueue(ops)
        stream.synchronize(10)

    enqueue = timed(run_by_calls, 20)
    graph.close()
    stream.close()
    return {
        "copy_bytes": size,
        "instantiate_us": round(instantiated, 1),
        "launch_p50_us": round(launch[100], 1),
        "launch_p99_us": round(launch[198], 1),
        "rate_gbs": round(rate / 1e9, 2),
        "enqueue_and_run": enqueue,
    }


def main() -> None:
    """Measure and print."""
    with open_node("cuda", "") as driver:
        device = driver.devices()[0]
        page = driver.words(16)
        stream = driver.stream(device.id)

        def release_wait() -> None:
            page.store(0, 0)
            stream.enqueue([Wait(page, 0, 1), Write(page, 1, 1)])
            page.store(0, 1)
            page.wait(1, 1, 1)
            page.store(1, 0)

        result = {
            "gpu": device.product,
            "python": platform.python_version(),
            "cuda_bindings": version("cuda-bindings"),
            "devices": [str(d) for d in driver.devices()],
            "links": [str(k) for k in driver.links()],
            "memory": {place: str(info) for place, info in driver.memory().items()},
            "granularity": driver.granularity(device.id),
            "memory_query": timed(driver.memory, 300),
            "health_query": timed(driver.health, 100),
            "devices_query": timed(driver.devices, 100),
            "store": timed(lambda: page.store(2, 1), 300),
            "wait_and_write_round_trip": timed(release_wait, 200),
            "device_memory": [memory(driver, device.id, n * MIB) for n in (2, 64, 1024)],
            "host_memory": [memory(driver, HOST, n * MIB) for n in (2, 64)],
            "programs": [programs(driver, MIB // 2), programs(driver, 16 * MIB)],
        }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
