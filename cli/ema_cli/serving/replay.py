"""Three runs of one trace, static partition, borrowing and twice the memory, and what the bound predicts for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ema_cli.serving.instance import Instance
from ema_cli.serving.node import Node, gpu_id
from ema_cli.serving.outcome import Outcome
from ema_cli.serving.prediction import Split, Workload, alone, lending, predict
from ema_cli.serving.presets import GpuSpec, Model, kv_share
from ema_cli.serving.run import Run
from ema_cli.serving.spread import spread
from ema_cli.serving.trace import Request
from ema_core.api import MemoryPool
from ema_core.errors import InvalidInput
from ema_core.resolve import GpuFacts, resolve

LOADS = (1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0)
"""Loads of an active instance, in terms of what it serves with a static share, of which the default one is chosen."""
MOST_SERVED_BY_STATIC = 0.85
PREDICTED_FOR_STATIC = 0.82
"""The default load is the first for which the bound predicts that a static partition serves no larger part."""
BURST = 8.0
"""Bursts last this many times a request's patience, or more: shorter ones are outwaited."""
NEAR_PREDICTION = 0.95
MOST_BURSTS = 3
RUNS = ("static partition", "borrowing", "twice the memory")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed on what."""

    requests: Sequence[Request]
    pool: MemoryPool
    model: Model
    gpu: GpuSpec
    link: str
    gpus: int
    active: int
    """Instances that get requests at a time."""
    cycles: int | None
    """Bursts of every instance; None: as `bursts` says."""
    rate: float | None
    """Load as a multiple of the trace's own; None: see `LOADS`."""
    patience: float
    """Seconds."""
    seed: int


@dataclass(frozen=True, slots=True)
class Report:
    """Three runs of one trace, and what the bound predicts for each."""

    setup: Setup
    rate: float
    share: int
    """Bytes for keys and values on each GPU."""
    outcomes: tuple[Outcome, ...]
    """By run, as in `RUNS`."""
    predicted: tuple[int, ...]
    """Requests served, by run."""

    @property
    def shortfalls(self) -> list[str]:
        """What the default load promises and these runs do not show; empty for a load that the user chose."""
        if self.setup.rate is not None:
            return []
        static, borrowing, _ = self.outcomes
        found = []
        if static.served > MOST_SERVED_BY_STATIC * static.offered:
            found.append(f"the static partition serves {static.served} of {static.offered} requests, more than 85 %")
        if borrowing.served < NEAR_PREDICTION * self.predicted[1]:
            found.append(f"borrowing serves {borrowing.served}, the bound predicts {self.predicted[1]}")
        return found


def replay(setup: Setup) -> Report:
    """Run the trace with a static partition, with borrowing and with twice the memory.

    Raises InvalidInput for a model that does not fit, a link that the GPU lacks, or a pool that selects no GPU.
    """
    share, link = kv_share(setup.model, setup.gpu), setup.gpu.link(setup.link)
    ids = [gpu_id(index) for index in range(setup.gpus)]
    policy = resolve(setup.pool, {gpu: GpuFacts(setup.gpu.name, setup.gpu.memory) for gpu in ids})
    if not policy.gpus:
        raise InvalidInput.of(
            "spec.gpus.products", list(setup.pool.spec.gpus.products), f"a list with {setup.gpu.name}"
        )
    workload = Workload.of(setup.requests, setup.model, setup.gpu)
    rate = setup.rate or default_rate(setup, workload, share)
    dealt, duration = deal(setup, rate)
    pod_limit = setup.pool.spec.borrowing.max_per_pod
    limit = pod_limit if pod_limit is not None else sum(policy.max_per_gpu.values())

    def instances(size: int, *, borrow_at: int) -> list[Instance]:
        return [
            Instance(model=setup.model, gpu=setup.gpu, share=size, link=borrow_at, limit=limit, patience=setup.patience)
            for _ in ids
        ]

    node = Node(
        gpus=setup.gpus,
        spec=setup.gpu,
        model=setup.model,
        share=share,
        link=link,
        pool=policy,
        limit=limit,
        max_traffic=setup.pool.spec.lending.max_traffic,
    )
    double = share + setup.gpu.memory
    outcomes = (
        Run(instances(share, borrow_at=0), dealt, duration, None).finish(),
        Run(instances(share, borrow_at=link), dealt, duration, node).finish(),
        Run(instances(double, borrow_at=0), dealt, duration, None).finish(),
    )
    lent = lending(
        workload,
        share=share,
        link=link,
        keep=policy.headroom + policy.hysteresis,
        most=min(policy.max_per_gpu.values()),
        limit=limit,
    )

    def served(outcome: Outcome, split: Split) -> int:
        refused = set(outcome.too_large)
        fitting = [[request for request in requests if request.id not in refused] for requests in dealt]
        return predict(workload, fitting, duration, setup.patience, split)

    predicted = tuple(map(served, outcomes, (alone(share), lent, alone(double))))
    return Report(setup, rate, share, outcomes, predicted)


def deal(setup: Setup, rate: float) -> tuple[list[list[Request]], float]:
    """Requests by instance, and the duration in seconds."""
    return spread(
        setup.requests,
        instances=setup.gpus,
        active=setup.active,
        cycles=bursts(setup, rate),
        rate=rate,
        seed=setup.seed,
    )


def bursts(setup: Setup, rate: float) -> int:
    """How often every instance bursts."""
    if setup.cycles is not None:
        return setup.cycles
    active_seconds = setup.requests[-1].arrival / rate * setup.active / setup.gpus
    fitting = int(active_seconds / (BURST * setup.patience)) if setup.patience else MOST_BURSTS
    return max(1, min(MOST_BURSTS, fitting))


def rates(setup: Setup, workload: Workload, share: int) -> Iterator[float]:
    """The rates at which an active instance has the loads of `LOADS`."""
    own = len(setup.requests) / max(setup.requests[-1].arrival, 1e-9) / setup.active
    capacity = workload.capacity(setup.requests, share)
    for load in LOADS:
        yield float(f"{load * capacity / own:.3g}")


def default_rate(setup: Setup, workload: Workload, share: int) -> float:
    """A rate at which a static partition falls short, and borrowing has something to show."""
    rate = 0.0
    for rate in rates(setup, workload, share):
        dealt, duration = deal(setup, rate)
        served = predict(workload, dealt, duration, setup.patience, alone(share))
        if served <= PREDICTED_FOR_STATIC * len(setup.requests):
            break
    return rate
