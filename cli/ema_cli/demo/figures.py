"""What three runs showed: as a table, as one object, as a picture, and what of it is not as it must be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from ema_cli.demo.layout import Layout
from ema_cli.demo.trial import Glance, Trial
from ema_cli.picture import Panel, Picture, svg
from ema_cli.serving.figures import LAYERS, floor_of, quantile, served_figures
from ema_cli.serving.replay import MOST_SERVED_BY_STATIC, NEAR_PREDICTION, RUNS, Report, bursts

AGREE: Final = 0.05
"""Part of its requests by which a run may differ from its replay."""
FEW: Final = 2
"""Requests by which it may always differ."""
TOO_SLOW: Final = 0.5
"""Real seconds behind after which the machine is named as a cause."""
HELD: Final = ("clean", "dirty", "moving")
"""States of lent chunks that take memory of their lender."""
GI: Final = 2**30


@dataclass(frozen=True, slots=True)
class Findings:
    """Three runs, and what `ema replay` and the bound say about the same three."""

    layout: Layout
    replayed: Report
    trials: Sequence[Trial]
    chosen_rate: bool
    """The user chose the load, so it may be one that shows nothing."""

    @property
    def complaints(self) -> list[str]:
        """What is not as it must be, in sentences; empty if all is well."""
        found = []
        for name, trial in zip(RUNS, self.trials, strict=True):
            if trial.wrong:
                found.append(f"{name}: {trial.wrong} bytes were wrong")
            if trial.leaked:
                found.append(f"{name}: {trial.leaked} bytes were not given back")
        static, borrowing, _ = (trial.outcome for trial in self.trials)
        if not self.chosen_rate and static.served > MOST_SERVED_BY_STATIC * static.offered:
            found.append(f"the static partition serves {static.served} of {static.offered} requests, more than 85 %")
        predicted, replayed = self.replayed.predicted[1], self.replayed.outcomes[1].served
        if not self.chosen_rate and borrowing.served < NEAR_PREDICTION * predicted - FEW:
            found.append(f"borrowing serves {borrowing.served} requests, the bound predicts {predicted}")
        if not agree(borrowing.served, replayed):
            found.append(f"borrowing serves {borrowing.served} requests, `ema replay` says {replayed}")
        late = max(trial.late for trial in self.trials)
        if found and late > TOO_SLOW:
            found.append(f"this machine was {late:.1f} s behind: a lower --speed or fewer --gpus may be what it needs")
        return found


def agree(served: int, replayed: int) -> bool:
    """Whether a run and its replay serve the same number of requests, within 5 %."""
    return abs(served - replayed) <= max(FEW, AGREE * replayed)


def lent(glance: Glance, index: int) -> dict[str, int]:
    """Real bytes that this GPU lends, by state."""
    gpu = next(g for g in glance.status["gpus"] if g["index"] == index)
    return {state: gpu["states"].get(state, 0) for state in HELD}


def as_object(findings: Findings) -> dict[str, Any]:
    """Plain data: bytes and seconds as shown, but for names that end in `_real`."""
    layout, replayed = findings.layout, findings.replayed
    setup = layout.setup
    return {
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "gpus": setup.gpus,
        "memory_bytes": setup.gpu.memory,
        "share_bytes": layout.share,
        "chunk_bytes": layout.chunk,
        "link": setup.link,
        "active": setup.active,
        "cycles": bursts(setup, layout.rate),
        "rate": layout.rate,
        "patience_seconds": setup.patience,
        "duration_seconds": layout.duration,
        "seed": setup.seed,
        "bytes_per_real_byte": layout.scale.size,
        "seconds_per_real_second": layout.scale.speed,
        "runs": {
            name: _run(findings, trial, replayed.outcomes[number].served, replayed.predicted[number])
            for number, (name, trial) in enumerate(zip(RUNS, findings.trials, strict=True))
        },
        "complaints": findings.complaints,
    }


def _run(findings: Findings, trial: Trial, replayed: int, predicted: int) -> dict[str, Any]:
    outcome, scale = trial.outcome, findings.layout.scale
    return {
        **served_figures(outcome),
        "replay_served": replayed,
        "predicted_served": predicted,
        "fetched_bytes": scale.shown(trial.fetched),
        "fetched_bytes_real": trial.fetched,
        "stored_bytes": scale.shown(trial.stored),
        "exposed_seconds": trial.exposed,
        "step_seconds": outcome.busy,
        "reclaims": len(trial.reclaims),
        "reclaim_p50_seconds_real": quantile(trial.reclaims, 0.5),
        "reclaim_p99_seconds_real": quantile(trial.reclaims, 0.99),
        "checked_bytes_real": trial.checked,
        "wrong_bytes": trial.wrong,
        "leaked_bytes": trial.leaked,
        "late_seconds_real": trial.late,
    }


def table(findings: Findings) -> Table:
    """The three runs side by side."""
    layout = findings.layout
    setup, scale = layout.setup, layout.scale
    result = Table(
        title=f"{len(setup.requests)} requests, {setup.model.name} on {setup.gpus} x {setup.gpu.name} with "
        f"{setup.gpu.memory / GI:.3g} GiB over {setup.link}",
        caption=f"1 real byte stands for {scale.size}, 1 real second for {scale.speed:g}; times are of the served GPUs "
        "unless marked real",
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("")
    for name in RUNS:
        result.add_column(name, justify="right")

    def row(name: str, cell: Callable[[Trial], str]) -> None:
        result.add_row(name, *map(cell, findings.trials))

    row("requests served", lambda t: f"{t.outcome.served} ({_part(t.outcome.served, t.outcome.offered)})")
    result.add_row("  ema replay says", *(str(o.served) for o in findings.replayed.outcomes))
    result.add_row("  the bound predicts", *map(str, findings.replayed.predicted))
    row("waiting p50 / p99 (s)", lambda t: _quantiles(t.outcome.waits, 1, 2))
    row("latency p50 / p99 (s)", lambda t: _quantiles(t.outcome.latencies, 1, 1))
    row("tokens/s", lambda t: f"{t.outcome.tokens / t.outcome.duration:.0f}")
    row("preemptions", lambda t: str(t.outcome.preemptions))
    row("fetched", lambda t: f"{scale.shown(t.fetched) / 1e12:.2f} TB")
    row("  real bytes", lambda t: f"{t.fetched / 1e9:.2f} GB")
    row("exposed wait", lambda t: _part(t.exposed, t.outcome.busy, digits=1))
    row("reclaims", lambda t: str(len(t.reclaims)))
    row("  p50 / p99 (real ms)", lambda t: _quantiles(t.reclaims, 1000, 1) if t.reclaims else "-")
    row("real bytes checked", lambda t: f"{t.checked / 1e9:.2f} GB")
    row("wrong bytes", lambda t: str(t.wrong))
    row("leaked bytes", lambda t: str(t.leaked))
    return result


def _part(value: float, whole: float, digits: int = 0) -> str:
    return f"{value / whole if whole else 0:.{digits}%}"


def _quantiles(values: Sequence[float], unit: float, digits: int) -> str:
    return " / ".join(f"{quantile(values, part) * unit:.{digits}f}" for part in (0.5, 0.99))


def picture(findings: Findings) -> str:
    """Memory of every GPU over time in every run, as measured, in SVG."""
    layout = findings.layout
    setup, scale = layout.setup, layout.scale
    weights = setup.model.weights
    rows = [[_panel(layout, trial, index) for trial in findings.trials] for index in range(setup.gpus)]
    return svg(
        Picture(
            title="Memory over time, measured: static partition, borrowing, twice the memory",
            subtitle=f"{setup.model.name} on {setup.gpus} x {setup.gpu.name}, {setup.link}; 1 byte stands for "
            f"{scale.size}, 1 s for {scale.speed:g}; axes begin inside the weights",
            columns=[f"{t.kind.name}: {t.outcome.served} of {t.outcome.offered} served" for t in findings.trials],
            rows=[f"GPU {index}" for index in range(setup.gpus)],
            layers=LAYERS,
            panels=rows,
            duration=layout.duration,
            floor=floor_of(weights, setup.gpu.memory),
            top=max(sum(value) for row in rows for value in row[1].values) + (setup.gpu.memory - weights) // 8,
        )
    )


def _panel(layout: Layout, trial: Trial, index: int) -> Panel:
    moments, values = [], []
    for glance in trial.glances:
        worker = glance.workers[index]
        if worker is not None:
            moments.append(glance.moment)
            given = layout.scale.shown(sum(lent(glance, index).values()))
            values.append((layout.setup.model.weights, worker.local, given, worker.granted))
    return Panel(
        moments or [0.0], values or [(layout.setup.model.weights, 0, 0, 0)], layout.setup.gpu.memory + trial.kind.extra
    )
