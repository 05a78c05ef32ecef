"""What is on the screen while the demo runs: a live view on a terminal, a line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ema_cli.demo.figures import lent
from ema_cli.demo.layout import Layout
from ema_cli.demo.trial import Glance, Kind, Trial

EVERY: Final = 4.0
"""Real seconds between two lines."""
RATE_OVER: Final = 5
"""Glances over which link use is measured."""
BAR: Final = 44
"""Cells of a GPU's bar where the terminal has room."""
BESIDE_BAR: Final = 60
"""Cells of everything else in its row, lenders of up to five characters included."""
FRAME: Final = 4
COLOURS: Final = {
    "weights": "grey50",
    "own": "blue",
    "clean": "green",
    "dirty": "yellow",
    "moving": "magenta",
    "free": "grey23",
}
LEGEND: Final = {
    "weights": "own weights",
    "own": "own keys and values",
    "clean": "lent, with a copy in host memory",
    "dirty": "lent",
    "moving": "on its way",
    "free": "free",
}
GI: Final = 2**30


class View(Protocol):
    """Shows runs as they go."""

    def begin(self, kind: Kind, number: int) -> None:
        """A run begins; there are three."""

    def look(self, glance: Glance) -> None:
        """Everything at one moment."""

    def end(self, trial: Trial) -> None:
        """The run is over."""


class Silent:
    """Shows nothing."""

    def begin(self, kind: Kind, number: int) -> None:
        """Nothing."""

    def look(self, glance: Glance) -> None:
        """Nothing."""

    def end(self, trial: Trial) -> None:
        """Nothing."""


class Lines:
    """A line every few seconds."""

    def __init__(self, console: Console, layout: Layout) -> None:
        self._console, self._layout = console, layout
        self._link = _LinkUse(layout)
        self._said = 0.0
        self._name = ""

    def begin(self, kind: Kind, number: int) -> None:
        """Say which run."""
        self._name = f"[{number}/3] {kind.name}"
        self._said = time.monotonic()
        self._link = _LinkUse(self._layout)
        self._say(f"{self._name}: starting a simulated server and one worker for each GPU")

    def look(self, glance: Glance) -> None:
        """Say how far it is, if it is time to."""
        rate = self._link.look(glance)
        if (now := time.monotonic()) - self._said < EVERY:
            return
        self._said = now
        scale = self._layout.scale
        workers = [worker for worker in glance.workers if worker is not None]
        given = sum(sum(lent(glance, g["index"]).values()) for g in glance.status["gpus"])
        self._say(
            f"{self._name}: {glance.moment / self._layout.duration:4.0%}, served {sum(w.served for w in workers)}, "
            f"running {sum(w.running for w in workers)}, waiting {sum(w.queue for w in workers)}, "
            f"lent {scale.shown(given) / GI:.1f} GiB, links {rate / 1e9:.0f} GB/s, "
            f"wrong bytes {sum(w.wrong for w in workers)}"
        )

    def end(self, trial: Trial) -> None:
        """Say what came of it."""
        outcome = trial.outcome
        self._say(
            f"{self._name}: {outcome.served} of {outcome.offered} requests served, "
            f"{trial.checked / 1e9:.1f} GB of real bytes checked, {trial.wrong} wrong, {trial.leaked} leaked"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class Screen:
    """The live view."""

    def __init__(self, live: Live, layout: Layout) -> None:
        self._live, self._layout = live, layout
        self._link = _LinkUse(layout)
        self._kind = Kind("", 0, borrows=False)
        self._number = 0
        self._bar_cells = max(8, min(BAR, live.console.width - FRAME - BESIDE_BAR))

    def begin(self, kind: Kind, number: int) -> None:
        """Show which run."""
        self._kind, self._number = kind, number
        self._link = _LinkUse(self._layout)
        self._live.update(Panel(Text("starting a simulated server and one worker for each GPU …"), title=self._title))

    def look(self, glance: Glance) -> None:
        """Show everything."""
        rate = self._link.look(glance)
        self._live.update(Panel(Group(self._gpus(glance), self._legend(), self._foot(glance, rate)), title=self._title))

    def end(self, trial: Trial) -> None:
        """Leave a line of what came of it."""
        outcome = trial.outcome
        self._live.console.print(
            f"{trial.kind.name}: [bold]{outcome.served}[/] of {outcome.offered} requests served, "
            f"{trial.wrong} bytes wrong, {trial.leaked} leaked",
            highlight=False,
        )

    @property
    def _title(self) -> str:
        return f"run {self._number} of 3: {self._kind.name}"

    def _gpus(self, glance: Glance) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), expand=False)
        for name in ("GPU", "memory", "own", "lent", "borrowed", "from", "running", "queue", "served"):
            table.add_column(name, justify="left" if name in ("memory", "from") else "right", no_wrap=True)
        leases = {lease["gpu"]: lease for lease in glance.leases}
        for gpu in sorted(glance.status["gpus"], key=lambda g: int(g["index"])):
            worker = glance.workers[gpu["index"]]
            given = {state: self._layout.scale.shown(size) for state, size in lent(glance, gpu["index"]).items()}
            own = worker.local if worker is not None else 0
            table.add_row(
                str(gpu["index"]),
                self._bar({"weights": self._layout.setup.model.weights, "own": own, **given}),
                _gib(own),
                _gib(sum(given.values())),
                _gib(worker.granted if worker is not None else 0),
                self._lenders(leases.get(gpu["id"]), glance),
                str(worker.running) if worker is not None else "",
                str(worker.queue + worker.parked) if worker is not None else "",
                str(worker.served) if worker is not None else "",
            )
        return table

    def _bar(self, sizes: dict[str, int]) -> Text:
        total = self._layout.setup.gpu.memory + self._kind.extra
        bar, drawn, seen = Text(), 0, 0
        for state, size in sizes.items():
            seen += size
            upto = min(self._bar_cells, round(seen / total * self._bar_cells))
            bar.append("█" * (upto - drawn), COLOURS[state])
            drawn = max(drawn, upto)
        return bar.append("░" * (self._bar_cells - drawn), COLOURS["free"])

    def _lenders(self, lease: Mapping[str, Any] | None, glance: Glance) -> str:
        held: Mapping[str, int] = lease["held"] if lease is not None else {}
        names: dict[str, str] = {g["id"]: str(g["index"]) for g in glance.status["gpus"]}
        return " ".join(names.get(place, place) for place in held)

    def _foot(self, glance: Glance, rate: float) -> RenderableType:
        workers = [worker for worker in glance.workers if worker is not None]
        scale, counted = self._layout.scale, glance.status["counted"]
        text = Text(
            f"links {rate / 1e9:5.0f} GB/s ({rate * scale.speed / scale.size / 1e6:.0f} MB/s of real bytes)   "
            f"leases {len(glance.leases)}   waiting for memory {len(glance.status['queue'])}   "
            f"reclaims {len(counted['recent_reclaims'])}   wrong bytes {sum(w.wrong for w in workers)}"
        )
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=self._layout.duration, completed=glance.moment, width=self._bar_cells),
            f"{glance.moment:.0f} of {self._layout.duration:.0f} s at {scale.speed:g}x; 1 byte stands for {scale.size}",
        )
        return Group(text, grid)

    @staticmethod
    def _legend() -> Text:
        text = Text()
        for state, name in LEGEND.items():
            text.append("█ ", COLOURS[state]).append(f"{name}   ")
        return text


class _LinkUse:
    """Bytes per second over all links, as shown."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)

    def look(self, glance: Glance) -> float:
        moved = sum(worker.link_bytes for worker in glance.workers if worker is not None)
        self._seen.append((glance.moment, moved))
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return self._layout.scale.shown(after - before) / (last - first) if last > first else 0.0


def _gib(size: int) -> str:
    return f"{size / GI:.1f}" if size else "-"


@contextmanager
def view(console: Console, layout: Layout, *, quiet: bool) -> Iterator[View]:
    """What suits the place where it is shown."""
    if quiet:
        yield Silent()
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=8, transient=True) as live:
            yield Screen(live, layout)
    else:
        yield Lines(console, layout)
