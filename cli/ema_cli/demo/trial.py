"""One run of the trace on a fresh simulated server."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ema_cli.demo.crew import Crew
from ema_cli.demo.layout import Layout
from ema_cli.demo.messages import Progress, Result
from ema_cli.demo.server import Server
from ema_cli.serving.outcome import Outcome

TICK: Final = 0.1
"""Real seconds between two looks at everything."""
READY: Final = 60.0
SETTLE: Final = 5.0
"""Real seconds until everything must have been given back."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the three runs."""

    name: str
    extra: int
    """Bytes, as shown, that every GPU has more."""
    borrows: bool


@dataclass(frozen=True, slots=True)
class Glance:
    """Everything at one moment of a run."""

    moment: float
    """Seconds of the run."""
    workers: Sequence[Progress | None]
    status: dict[str, Any]
    leases: Sequence[dict[str, Any]]


@dataclass(slots=True)
class Trial:
    """What came of a run."""

    kind: Kind
    outcome: Outcome
    fetched: int = 0
    """Real bytes, as are all sizes here."""
    stored: int = 0
    checked: int = 0
    wrong: int = 0
    leaked: int = 0
    exposed: float = 0.0
    """Seconds of the run, measured by the clients."""
    late: float = 0.0
    """Real seconds that this machine was too slow for the speed, at the worst worker."""
    reclaims: list[float] = field(default_factory=list)
    """Real seconds, one for every time a lender got memory back."""
    glances: list[Glance] = field(default_factory=list)


def run(layout: Layout, kind: Kind, look: Callable[[Glance], None]) -> Trial:
    """Run the trace; `look` is shown everything several times a second. Raises DemoFailed."""
    with Server(layout.pool(lends=kind.borrows), layout.sim(kind.extra)) as server:
        before = server.free()
        jobs = layout.jobs(server.socket, share=layout.share + kind.extra, borrows=kind.borrows)
        glances: list[Glance] = []
        with Crew(jobs, server.folder) as crew:
            crew.until_ready(READY)
            began = time.monotonic() + TICK
            for worker in crew.workers:
                worker.go(began)
            due = began
            while not crew.done:
                crew.hear(max(0.0, due - time.monotonic()))
                if (now := time.monotonic()) >= due:
                    due = now + TICK
                    moment = min(layout.duration, (now - began) * layout.scale.speed)
                    progress = [worker.progress for worker in crew.workers]
                    glances.append(Glance(moment, progress, server.ask("status"), server.ask("leases")["leases"]))
                    look(glances[-1])
            results = [worker.result for worker in crew.workers if worker.result is not None]
        leaked = _leaked(server, before)
        reclaims = [entry["seconds"] for entry in server.ask("status")["counted"]["recent_reclaims"]]
    trial = _total(kind, results, layout.scale.speed)
    trial.leaked, trial.reclaims, trial.glances = leaked, reclaims, glances
    return trial


def _leaked(server: Server, before: dict[Any, int]) -> int:
    """Real bytes that are not free as they were, when everybody has had time to give back."""
    deadline = time.monotonic() + SETTLE
    while True:
        after = server.free()
        leaked = sum(max(0, free - after.get(place, 0)) for place, free in before.items())
        if not leaked or time.monotonic() > deadline:
            return leaked
        time.sleep(0.02)


def _total(kind: Kind, results: Sequence[Result], speed: float) -> Trial:
    outcome = Outcome(0, results[0].outcome.duration)
    for one in (result.outcome for result in results):
        for name in ("offered", "served", "tokens", "preemptions", "fetched", "stored", "gave_up", "unfinished"):
            setattr(outcome, name, getattr(outcome, name) + getattr(one, name))
        outcome.exposed += one.exposed
        outcome.busy += one.busy
        outcome.waits += one.waits
        outcome.latencies += one.latencies
        outcome.too_large += one.too_large
    return Trial(
        kind=kind,
        outcome=outcome,
        fetched=sum(r.fetched for r in results),
        stored=sum(r.stored for r in results),
        checked=sum(r.checked for r in results),
        wrong=sum(r.wrong for r in results),
        exposed=speed * sum(r.exposed for r in results),
        late=max(r.late for r in results),
    )
