"""A replay's report as an object, a table and a picture."""

from rich.table import Table

from ema_cli.picture import Panel, Picture, svg
from ema_cli.serving.figures import LAYERS, floor_of, quantile, served_figures
from ema_cli.serving.outcome import Outcome
from ema_cli.serving.replay import RUNS, Report, bursts


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
        **served_figures(outcome),
        "predicted_served": predicted,
        "refused": len(outcome.too_large),
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
            layers=LAYERS,
            panels=rows,
            duration=report.outcomes[0].duration,
            floor=floor_of(weights, memory),
            top=max(memory, *map(sum, borrowing)) + (memory - weights) // 8,
        )
    )
