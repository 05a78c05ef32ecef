"""`ema replay`: what a request trace would gain from borrowing, in virtual time, before anything is installed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from ema_cli.picture import Layer, Panel, Picture, svg
from ema_cli.serving.instance import Instance
from ema_cli.serving.node import Node, gpu_id
from ema_cli.serving.prediction import Split, Workload, alone, lending, predict
from ema_cli.serving.presets import GpuSpec, Model, find_gpu, find_model, kv_share
from ema_cli.serving.run import Outcome, Run
from ema_cli.serving.spread import spread
from ema_cli.serving.trace import Request, read_trace
from ema_core.api import MemoryPool, load_pools
from ema_core.errors import InvalidInput
from ema_core.quantity import parse_duration
from ema_core.resolve import GpuFacts, implausible, resolve

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


def default_rate(setup: Setup, workload: Workload, share: int) -> float:
    """A rate at which a static partition falls short, and borrowing has something to show."""
    own = len(setup.requests) / max(setup.requests[-1].arrival, 1e-9) / setup.active
    capacity = workload.capacity(setup.requests, share)
    rate = 0.0
    for load in LOADS:
        rate = float(f"{load * capacity / own:.3g}")
        dealt, duration = deal(setup, rate)
        served = predict(workload, dealt, duration, setup.patience, alone(share))
        if served <= PREDICTED_FOR_STATIC * len(setup.requests):
            break
    return rate


def read_pool(path: Path) -> MemoryPool:
    """The one MemoryPool of a YAML file. Raises InvalidInput."""
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document is not None]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput.of(str(path), str(error), "a YAML document") from error
    except OSError as error:
        raise InvalidInput.of("--pool", str(path), f"a readable file ({error.strerror})") from error
    pools = load_pools(documents)
    if len(pools) != 1:
        raise InvalidInput.of(str(path), len(pools), "just one MemoryPool")
    return pools[0]


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of them lie (0 to 1), 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def as_object(report: Report) -> dict[str, object]:
    """The report as plain data: bytes, seconds, counts."""
    setup = report.setup
    return {
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "gpus": setup.gpus,
        "active": setup.active,
        "cycles": bursts(setup, report.rate),
        "link": setup.link,
        "rate": report.rate,
        "patience_seconds": setup.patience,
        "seed": setup.seed,
        "share_bytes": report.share,
        "requests": len(setup.requests),
        "runs": {
            name: _run_object(outcome, predicted)
            for name, outcome, predicted in zip(RUNS, report.outcomes, report.predicted, strict=True)
        },
        "predicted_gain": _ratio(report.predicted[1], report.predicted[0]),
        "gain": _ratio(report.outcomes[1].served, report.outcomes[0].served),
        "shortfalls": report.shortfalls,
    }


def _ratio(value: float, base: float) -> float | None:
    return round(value / base, 4) if base else None


def _run_object(outcome: Outcome, predicted: int) -> dict[str, object]:
    return {
        "duration_seconds": outcome.duration,
        "offered": outcome.offered,
        "served": outcome.served,
        "predicted_served": predicted,
        "gave_up": outcome.gave_up,
        "refused": len(outcome.too_large),
        "unfinished": outcome.unfinished,
        "wait_p50_seconds": quantile(outcome.waits, 0.5),
        "wait_p99_seconds": quantile(outcome.waits, 0.99),
        "latency_p50_seconds": quantile(outcome.latencies, 0.5),
        "latency_p99_seconds": quantile(outcome.latencies, 0.99),
        "tokens_per_second": outcome.tokens / outcome.duration,
        "preemptions": outcome.preemptions,
        "fetched_bytes": outcome.fetched,
        "stored_bytes": outcome.stored,
        "moved_bytes": outcome.traffic.moved,
        "reclaims": len(outcome.traffic.reclaims),
        "reclaim_p50_seconds": quantile(outcome.traffic.reclaims, 0.5),
        "reclaim_p99_seconds": quantile(outcome.traffic.reclaims, 0.99),
        "exposed_seconds": outcome.exposed,
        "step_seconds": outcome.busy,
        "plans": outcome.traffic.plans,
    }


def table(report: Report) -> Table:
    """The three runs side by side."""
    setup = report.setup
    result = Table(
        title=f"{len(setup.requests)} requests, {setup.model.name} on {setup.gpus} x {setup.gpu.name} over "
        f"{setup.link}, rate {report.rate:g}",
        caption=f"{report.share / 2**30:.1f} GiB a GPU for keys and values; requests leave after {setup.patience:g} s",
    )
    result.add_column("")
    for name in RUNS:
        result.add_column(name, justify="right")

    def row(name: str, *cells: str) -> None:
        result.add_row(name, *cells)

    outcomes = report.outcomes
    row("requests served", *(f"{o.served} ({o.served / o.offered:.1%})" for o in outcomes))
    row("  the bound predicts", *(str(predicted) for predicted in report.predicted))
    row("left before they began", *(str(o.gave_up) for o in outcomes))
    row("too large", *(str(len(o.too_large)) for o in outcomes))
    row("waiting p50/p99 (s)", *(f"{quantile(o.waits, 0.5):.2f} / {quantile(o.waits, 0.99):.1f}" for o in outcomes))
    row(
        "latency p50/p99 (s)",
        *(f"{quantile(o.latencies, 0.5):.1f} / {quantile(o.latencies, 0.99):.1f}" for o in outcomes),
    )
    row("tokens/s", *(f"{o.tokens / o.duration:.0f}" for o in outcomes))
    row("preemptions", *(str(o.preemptions) for o in outcomes))
    row("fetched (TB)", *(f"{o.fetched / 1e12:.1f}" for o in outcomes))
    row("moved, policy (GB)", *(f"{o.traffic.moved / 1e9:.1f}" for o in outcomes))
    row("reclaims", *(str(len(o.traffic.reclaims)) for o in outcomes))
    row(
        "reclaim p50/p99 (ms)",
        *(
            f"{quantile(o.traffic.reclaims, 0.5) * 1e3:.1f} / {quantile(o.traffic.reclaims, 0.99) * 1e3:.1f}"
            for o in outcomes
        ),
    )
    row("exposed wait", *(f"{o.exposed / o.busy if o.busy else 0:.2%}" for o in outcomes))
    return result


def picture(report: Report) -> str:
    """Memory over time of every GPU in every run, as an SVG document."""
    setup = report.setup
    weights, memory = setup.model.weights, setup.gpu.memory
    rows = [
        [
            Panel(
                moments=[moment for moment, _ in outcome.samples],
                values=[
                    (weights, samples[gpu].local, samples[gpu].lent, samples[gpu].borrowed)
                    for _, samples in outcome.samples
                ],
                limit=limit,
            )
            for outcome, limit in zip(report.outcomes, (memory, memory, 2 * memory), strict=True)
        ]
        for gpu in range(setup.gpus)
    ]
    borrowing = [moment for row in rows for moment in row[1].values]
    return svg(
        Picture(
            title="Memory over time: static partition, borrowing, twice the memory",
            subtitle=f"{setup.model.name} on {setup.gpus} x {setup.gpu.name}, {setup.link}, rate {report.rate:g}; "
            f"axes begin inside the weights, higher values are cut",
            columns=[
                f"{name}: {outcome.served} of {outcome.offered} served"
                for name, outcome in zip(RUNS, report.outcomes, strict=True)
            ],
            rows=[f"GPU {gpu}" for gpu in range(setup.gpus)],
            layers=(
                Layer("own weights", "#9aa5b1"),
                Layer("own keys and values", "#2f6fb3"),
                Layer("lent to others", "#e2a13b"),
                Layer("borrowed (elsewhere)", "#58a55c"),
            ),
            panels=rows,
            duration=report.outcomes[0].duration,
            floor=max(0, weights - (memory - weights) // 4),
            top=max(memory, *map(sum, borrowing)) + (memory - weights) // 8,
        )
    )


def replay_command(  # noqa: PLR0917 (typer takes options as parameters)
    trace: Annotated[Path, typer.Argument(help="Azure CSV or Mooncake JSONL, plain or gzipped.")],
    pool: Annotated[Path, typer.Option(help="MemoryPool file.")],
    model: Annotated[str, typer.Option(help="Preset, or weights=16Gi,kv=128Ki,params=8G,layers=32.")] = "llama-3.1-70b",
    gpu: Annotated[
        str, typer.Option(help="Preset, or memory=24Gi,reserved=1Gi,compute=100T,read=1T,nvlink=0,pcie=25G.")
    ] = "h200",
    link: Annotated[str, typer.Option(help="nvlink or pcie, between GPUs.")] = "nvlink",
    gpus: Annotated[int, typer.Option(min=1, max=64, help="GPUs, with one instance each.")] = 8,
    active: Annotated[int | None, typer.Option(min=1, help="Instances with requests at a time; a quarter.")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, max=1000, help="Bursts of every instance; up to 3.")] = None,
    rate: Annotated[float | None, typer.Option(help="Load, as a multiple of the trace's own.")] = None,
    patience: Annotated[str, typer.Option(help="How long a request waits to begin before it leaves.")] = "30s",
    seed: Annotated[int, typer.Option(help="Deals requests to instances.")] = 0,
    svg_path: Annotated[Path, typer.Option("--svg", help="Where the picture goes.")] = Path("ema-replay.svg"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a request trace in virtual time: static partition, borrowing and twice the memory side by side."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        setup = Setup(
            requests=_read(trace),
            pool=read_pool(pool),
            model=find_model(model),
            gpu=find_gpu(gpu),
            link=link,
            gpus=gpus,
            active=_active(active, gpus),
            cycles=cycles,
            rate=_positive(rate),
            patience=parse_duration(patience, "--patience"),
            seed=seed,
        )
        report = replay(setup)
    except InvalidInput as refused:
        errors.print(str(refused))
        raise typer.Exit(2) from None
    for warning in implausible(setup.pool):
        errors.print(f"warning: {warning}")
    try:
        svg_path.write_text(picture(report), "utf-8")
    except OSError as error:
        errors.print(f"--svg: got {str(svg_path)!r}; expected a file that can be written ({error.strerror})")
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(as_object(report)))
    else:
        Console().print(table(report))
        typer.echo(f"picture: {svg_path}")
    for shortfall in report.shortfalls:
        errors.print(shortfall)
    if report.shortfalls:
        raise typer.Exit(1)


def _read(trace: Path) -> list[Request]:
    try:
        return list(read_trace(trace))
    except OSError as error:
        raise InvalidInput.of("TRACE", str(trace), f"a readable file ({error.strerror})") from error


def _active(active: int | None, gpus: int) -> int:
    if active is None:
        return max(1, gpus // 4)
    if active > gpus:
        raise InvalidInput.of("--active", active, f"at most {gpus}, the number of GPUs")
    return active


def _positive(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate <= 1e6:
        raise InvalidInput.of("--rate", rate, "a number above 0, at most 1000000")
    return rate
