"""From what was asked for to what is run: sizes in whole chunks, the excerpt of the trace, the pool and the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ema_cli.demo.messages import Job
from ema_cli.demo.scale import Scale
from ema_cli.demo.serve import WINDOWS
from ema_cli.serving.prediction import Workload, alone, predict
from ema_cli.serving.presets import GpuSpec, Model, kv_share
from ema_cli.serving.replay import LOADS, Setup, deal
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
class Wish:
    """What was asked for."""

    requests: Sequence[Request]
    model: Model
    gpu: GpuSpec
    link: str
    gpus: int
    active: int
    cycles: int | None
    rate: float | None
    patience: float
    """Seconds of the run."""
    seed: int
    duration: float
    """Real seconds of each run."""
    scale: Scale


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


def lay_out(wish: Wish) -> Layout:
    """Sizes, load and excerpt. Raises InvalidInput for what cannot be run."""
    chunk = wish.scale.shown(CHUNK)
    model = replace(wish.model, weights=-(-wish.model.weights // chunk) * chunk)
    share = kv_share(model, wish.gpu) // chunk * chunk
    if not share:
        least = model.weights + wish.gpu.reserved + chunk
        raise InvalidInput.of("--memory", wish.gpu.memory, f"at least {least} bytes for {model.name}")
    if model.kv_per_token % wish.scale.size:
        raise InvalidInput.of("--scale", wish.scale.size, f"a divisor of the {model.kv_per_token} bytes of a token")
    gpu = replace(wish.gpu, reserved=wish.gpu.memory - model.weights - share)
    pool = _pool(chunk, wish.gpus * gpu.memory, HOLD, lends=True)
    rate, setup = _load(wish, model, gpu, load_pools([pool])[0], share)
    dealt, duration = deal(setup, rate)
    if duration < SHORTEST * wish.duration * wish.scale.speed:
        most = wish.requests[-1].arrival / rate / wish.scale.speed
        raise InvalidInput.of("--duration", f"{wish.duration:g}", f"at most {most:.0f} (s): the trace is no longer")
    return Layout(setup, rate, dealt, duration, share, chunk, wish.scale)


def _load(wish: Wish, model: Model, gpu: GpuSpec, pool: MemoryPool, share: int) -> tuple[float, Setup]:
    """The rate, and the excerpt at that rate; without a wish the first load that a static partition falls short of."""
    if wish.rate is not None:
        return wish.rate, _excerpt(wish, model, gpu, pool, wish.rate)
    own = len(wish.requests) / max(wish.requests[-1].arrival, 1e-9) / wish.active
    capacity = Workload.of(wish.requests, model, gpu).capacity(wish.requests, share)
    rate, setup = 0.0, None
    for load in LOADS:
        rate = float(f"{load * capacity / own:.3g}")
        setup = _excerpt(wish, model, gpu, pool, rate)
        dealt, duration = deal(setup, rate)
        workload = Workload.of(setup.requests, model, gpu)
        if predict(workload, dealt, duration, wish.patience, alone(share)) <= STATIC * len(setup.requests):
            break
    assert setup is not None  # noqa: S101 - there are loads
    return rate, setup


def _excerpt(wish: Wish, model: Model, gpu: GpuSpec, pool: MemoryPool, rate: float) -> Setup:
    last = wish.duration * wish.scale.speed * rate
    return Setup(
        requests=[r for r in wish.requests if r.arrival <= last],
        pool=pool,
        model=model,
        gpu=gpu,
        link=wish.link,
        gpus=wish.gpus,
        active=wish.active,
        cycles=wish.cycles,
        rate=rate,
        patience=wish.patience,
        seed=wish.seed,
    )


def _pool(chunk: int, host: int, hold: float, *, lends: bool) -> dict[str, Any]:
    spec: Mapping[str, Any] = {
        "chunkSize": chunk,
        "lending": {"maxPerGPU": f"{LENDABLE}%" if lends else "0%", "headroom": chunk, "hysteresis": chunk},
        "reclaim": {"hostMemory": host, "minHold": f"{hold:.3f}s"},
    }
    return {"apiVersion": "ema.dev/v1alpha1", "kind": "MemoryPool", "metadata": {"name": "demo"}, "spec": spec}
