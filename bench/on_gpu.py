"""What the benchmarks on a real GPU share: what they ran on, a slice of the GPU, times with their spread, the link.

A *scale model* is a green context of a few multiprocessors: compute and memory rate come down while the copy engines
keep theirs, so that host memory over PCIe stands to the slice as a neighbour's over NVLink stands to the whole GPU.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

import torch
from cuda.bindings import driver as cuda

GIB: Final = 1 << 30
MIB: Final = 1 << 20


def spec(host: int, chunk: int = 64 * MIB) -> dict[str, Any]:
    """A pool in which the host lends `host` bytes."""
    return {
        "chunkSize": str(chunk),
        "lending": {"host": str(host), "maxPerGPU": "2Gi", "headroom": "512Mi", "hysteresis": "128Mi"},
        "reclaim": {"hostMemory": str(host + 4 * GIB)},
        "borrowing": {"maxPerPod": str(host)},
    }


def versions() -> dict[str, str]:
    """Of the GPU's driver and of the libraries that the figures depend on."""
    import pynvml  # noqa: PLC0415 - not typed, and only this needs it

    pynvml.nvmlInit()
    found = {"driver": str(pynvml.nvmlSystemGetDriverVersion())}
    pynvml.nvmlShutdown()
    return found | {name: version(name) for name in ("torch", "cuda-bindings", "transformers", "accelerate")}


def name() -> str:
    """The GPU."""
    return str(torch.cuda.get_device_name(0))


def slice_of(multiprocessors: int) -> Any:  # noqa: ANN401  (torch publishes no types here)
    """A torch stream that uses only so many multiprocessors; all there are is the whole GPU."""
    torch.zeros(1, device="cuda")
    device = _ok(cuda.cuDeviceGet(0))
    resource = _ok(cuda.cuDeviceGetDevResource(device, cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    if multiprocessors >= resource.sm.smCount:
        return torch.cuda.Stream()
    groups, _, _ = _ok(cuda.cuDevSmResourceSplitByCount(1, resource, 0, multiprocessors))
    described = _ok(cuda.cuDevResourceGenerateDesc([groups[0]], 1))
    flags = cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = _ok(cuda.cuGreenCtxCreate(described, device, flags))
    stream = _ok(cuda.cuGreenCtxStreamCreate(green, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    return torch.cuda.ExternalStream(int(stream))


class Times:
    """Seconds of single steps: median and spread."""

    def __init__(self, seconds: list[float]) -> None:
        self.all = sorted(seconds)
        self.median = statistics.median(seconds)

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a part of the median."""
        tenth = max(1, len(self.all) // 10)
        return (self.all[-tenth] - self.all[tenth - 1]) / self.median

    def __str__(self) -> str:
        return f"{self.median * 1e3:.2f} ms ± {self.spread * 50:.1f} %"


def timed(step: Callable[[], object], stream: Any, times: int, warm: int = 2) -> Times:  # noqa: ANN401
    """Run steps on the stream, back to back, and time each on the GPU."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    with torch.cuda.stream(stream):
        for _ in range(warm):
            step()
        marks[0].record(stream)
        for mark in marks[1:]:
            step()
            mark.record(stream)
    stream.synchronize()
    return Times([a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)])


def link_rate() -> float:
    """Bytes per second from pinned host memory to the GPU, with nothing else going on: the bound's link."""
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    took = timed(lambda: target.copy_(source, non_blocking=True), torch.cuda.Stream(), 8)
    return GIB / took.median


def say(text: str) -> None:
    """Progress, to the terminal."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def _ok(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if int(result[0]):
        raise SystemExit(f"CUDA: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]
