"""From what was asked for to what is run: sizes in whole chunks, the excerpt of the trace, the pool and the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ema_cli.demo.messages import Job
from ema_cli.demo.scale import Scale
from ema_cli.demo.serve import WINDOWS
from ema_cli.serving.prediction import Workload, alone, predict
from ema_cli.serving.presets import kv_share
from ema_cli.serving.replay import Setup, deal, rates
from ema_cli.serving.trace import Request
from ema_core.api import MemoryPool, load_pools
from ema_core.errors import InvalidInput

CHUNK: Final = 256 << 10
"""Real bytes of a chunk."""
LENDABLE: Final = 75
"""Percent of a GPU that it lends at most."""
HOLD: Final = 1.0
"""Seconds that a borrower keeps what it got against its equals."""
STATIC: Final = 0.78
"""The default load is the first for which the bound predicts that a static partition serves no larger part."""
SHORTEST: Final = 0.9
"""Part of the duration that the trace must fill."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is run, as shown: in bytes and seconds of the GPUs that the simulated ones stand for."""

    setup: Setup
    """What `ema replay` is given for the same."""
    rate: float
    dealt: Sequence[Sequence[Request]]
    duration: float
    share: int
    """Bytes for keys and values, whole chunks."""
    chunk: int
    scale: Scale

    def pool(self, *, lends: bool) -> dict[str, Any]:
        """The pool, in real bytes."""
        return _pool(self.scale.real(self.chunk), self.scale.real(self.host), HOLD / self.scale.speed, lends=lends)

    @property
    def host(self) -> int:
        """Bytes of host memory for what is reclaimed."""
        return self.setup.gpus * self.setup.gpu.memory

    @property
    def limit(self) -> int:
        """Most that one worker may borrow: all that the GPUs may lend together."""
        return self.setup.gpus * (self.setup.gpu.memory * LENDABLE // 100)

    def sim(self, extra: int = 0) -> dict[str, Any]:
        """The server, in real bytes and rates, each GPU with `extra` bytes more."""
        scale, gpu = self.scale, self.setup.gpu
        reserved = scale.real(gpu.reserved)
        memory = scale.real(gpu.memory + extra) + WINDOWS
        return {
            "gpus": [{"count": self.setup.gpus, "product": gpu.name, "memory": memory, "reserved": reserved}],
            "hostMemory": 2 * scale.real(self.host),
            "granularity": 4096,
            "link": self.setup.link,
            "nvlinkRate": scale.real_rate(gpu.nvlink or 1),
            "pcieRate": scale.real_rate(gpu.pcie),
            "latency": "0s",
            "linger": "1s",
        }

    def jobs(self, socket: str, *, share: int, borrows: bool) -> list[Job]:
        """One for each GPU."""
        setup = self.setup
        return [
            Job(
                index=index,
                socket=socket,
                model=setup.model,
                gpu=setup.gpu,
                share=share,
                link=setup.gpu.link(setup.link) if borrows else 0,
                limit=self.limit if borrows else 0,
                patience=setup.patience,
                requests=list(requests),
                duration=self.duration,
                size_scale=self.scale.size,
                speed=self.scale.speed,
                seed=setup.seed,
            )
            for index, requests in enumerate(self.dealt)
        ]


def pool_over(gpus: int, memory: int, scale: Scale) -> MemoryPool:
    """The pool over so many GPUs with so many bytes each."""
    return load_pools([_pool(scale.shown(CHUNK), gpus * memory, HOLD, lends=True)])[0]


def lay_out(asked: Setup, seconds: float, scale: Scale) -> Layout:
    """Sizes, load and excerpt for runs of so many real seconds. Raises InvalidInput for what cannot be run."""
    chunk = scale.shown(CHUNK)
    model = replace(asked.model, weights=-(-asked.model.weights // chunk) * chunk)
    share = kv_share(model, asked.gpu) // chunk * chunk
    if not share:
        least = model.weights + asked.gpu.reserved + chunk
        raise InvalidInput.of("--memory", asked.gpu.memory, f"at least {least} bytes for {model.name}")
    if model.kv_per_token % scale.size:
        raise InvalidInput.of("--scale", scale.size, f"a divisor of the {model.kv_per_token} bytes of a token")
    gpu = replace(asked.gpu, reserved=asked.gpu.memory - model.weights - share)
    rate, setup = _load(replace(asked, model=model, gpu=gpu), seconds * scale.speed, share)
    dealt, duration = deal(setup, rate)
    if duration < SHORTEST * seconds * scale.speed:
        most = asked.requests[-1].arrival / rate / scale.speed
        raise InvalidInput.of("--duration", f"{seconds:g}", f"at most {most:.0f} (s): the trace is no longer")
    return Layout(setup, rate, dealt, duration, share, chunk, scale)


def _load(asked: Setup, seconds: float, share: int) -> tuple[float, Setup]:
    """The rate and the excerpt; unless asked for, the first rate that a static partition falls short of."""
    if asked.rate is not None:
        return asked.rate, _excerpt(asked, asked.rate, seconds)
    rate, found = 0.0, asked
    for rate in rates(asked, Workload.of(asked.requests, asked.model, asked.gpu), share):
        found = _excerpt(asked, rate, seconds)
        dealt, duration = deal(found, rate)
        workload = Workload.of(found.requests, found.model, found.gpu)
        if predict(workload, dealt, duration, found.patience, alone(share)) <= STATIC * len(found.requests):
            break
    return rate, found


def _excerpt(asked: Setup, rate: float, seconds: float) -> Setup:
    return replace(asked, requests=[r for r in asked.requests if r.arrival <= seconds * rate], rate=rate)


def _pool(chunk: int, host: int, hold: float, *, lends: bool) -> dict[str, Any]:
    spec: Mapping[str, Any] = {
        "chunkSize": chunk,
        "lending": {"maxPerGPU": f"{LENDABLE}%" if lends else "0%", "headroom": chunk, "hysteresis": chunk},
        "reclaim": {"hostMemory": host, "minHold": f"{hold:.3f}s"},
    }
    return {"apiVersion": "ema.dev/v1alpha1", "kind": "MemoryPool", "metadata": {"name": "demo"}, "spec": spec}
