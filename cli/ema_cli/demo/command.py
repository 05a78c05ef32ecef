"""`ema demo`: the main job, on a server of simulated GPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from ema_cli.demo.figures import Findings, as_object, picture, table
from ema_cli.demo.layout import Layout, lay_out, pool_over
from ema_cli.demo.scale import Scale
from ema_cli.demo.server import DemoFailed
from ema_cli.demo.stop import stoppable
from ema_cli.demo.trial import Kind, Trial, run
from ema_cli.demo.view import View, view
from ema_cli.out import FAILED, as_json, bad_input, errors, fail, screen
from ema_cli.serving.options import active_of, rate_of, requests_of, within
from ema_cli.serving.presets import find_gpu, find_model
from ema_cli.serving.replay import RUNS, Setup, replay
from ema_core.errors import InvalidInput
from ema_core.quantity import parse_duration, parse_quantity

SHORT: Final = 20
"""Seconds of a run below which its figures say little."""
TRACE: Final = "azure_conversation_10min.csv"
STOPPED: Final = 130
"""Exit code after Ctrl-C."""


def demo(  # noqa: PLR0917 (typer takes options as parameters)
    trace: Annotated[Path | None, typer.Option(help="Request trace; without it, ten minutes of Azure's.")] = None,
    gpus: Annotated[int, typer.Option(min=2, max=16, help="GPUs, with one worker process each.")] = 4,
    memory: Annotated[str, typer.Option(help="Of each GPU, such as 24Gi; scaled down for this machine.")] = "20Gi",
    model: Annotated[str, typer.Option(help="Preset, or weights=16Gi,kv=128Ki,params=8G,layers=32.")] = "llama-3.1-8b",
    gpu: Annotated[
        str,
        typer.Option(help="Whose rates; a preset, or memory=24Gi,reserved=1Gi,compute=100T,read=1T,nvlink=0,pcie=25G."),
    ] = "a100-80g",
    link: Annotated[str, typer.Option(help="nvlink or pcie, between GPUs.")] = "nvlink",
    duration: Annotated[str, typer.Option(help="Of each of the three runs, in real time.")] = "26s",
    speed: Annotated[float, typer.Option(help="Seconds of the served GPUs in one real second.")] = 2.5,
    scale: Annotated[int, typer.Option(help="Bytes of the served GPUs for one real byte.")] = 1024,
    active: Annotated[int | None, typer.Option(min=1, help="GPUs with requests at a time; a quarter.")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, max=100, help="Bursts of every GPU.")] = None,
    rate: Annotated[float | None, typer.Option(help="Load, as a multiple of the trace's own.")] = None,
    patience: Annotated[str, typer.Option(help="How long a request waits to begin before it leaves.")] = "3s",
    seed: Annotated[int, typer.Option(help="Deals requests to GPUs and makes the bytes.")] = 0,
    svg: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("ema-demo.svg"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve a real trace on simulated GPUs: static partition, borrowing, twice the memory."""
    with bad_input():
        scaled = Scale(_whole_scale(scale), within("--speed", speed, 1000))
        served = replace(find_gpu(gpu), memory=parse_quantity(memory, "--memory"))
        asked = Setup(
            requests=requests_of("--trace", trace or own_trace()),
            pool=pool_over(gpus, served.memory, scaled),
            model=find_model(model),
            gpu=served,
            link=link,
            gpus=gpus,
            active=active_of(active, gpus),
            cycles=cycles,
            rate=rate_of(rate),
            patience=parse_duration(patience, "--patience"),
            seed=_seed(seed),
        )
        layout = lay_out(asked, within("--duration", parse_duration(duration, "--duration"), 3600), scaled)
        replayed = replay(layout.setup)
        _writable(svg)
    if not json_:
        _introduce(layout)
    try:
        with stoppable(), view(screen, layout, quiet=json_) as shown:
            trials = _three(layout, shown)
    except DemoFailed as failed:
        raise fail(str(failed)) from None
    except KeyboardInterrupt:
        errors.print("stopped; nothing is left behind", highlight=False)
        raise typer.Exit(STOPPED) from None
    findings = Findings(layout, replayed, trials, chosen_rate=rate is not None)
    svg.write_text(picture(findings), "utf-8")
    if json_:
        as_json(as_object(findings))
    else:
        screen.print(table(findings))
        screen.print(f"picture: {svg}", highlight=False, soft_wrap=True)
    for complaint in findings.complaints:
        errors.print(f"not as it must be: {complaint}", highlight=False, markup=False, soft_wrap=True)
    if findings.complaints:
        raise typer.Exit(FAILED)


def _three(layout: Layout, shown: View) -> list[Trial]:
    kinds = [
        Kind(RUNS[0], 0, borrows=False),
        Kind(RUNS[1], 0, borrows=True),
        Kind(RUNS[2], layout.setup.gpu.memory, borrows=False),
    ]
    trials = []
    for number, kind in enumerate(kinds, 1):
        shown.begin(kind, number)
        trials.append(run(layout, kind, shown.look))
        shown.end(trials[-1])
    return trials


def _introduce(layout: Layout) -> None:
    setup, scale = layout.setup, layout.scale
    real = scale.real(setup.gpu.memory) / 2**20
    screen.print(
        f"{len(setup.requests)} requests of the trace in {layout.duration:.0f} s (rate {layout.rate:g}) on "
        f"{setup.gpus} simulated GPUs of {setup.gpu.memory / 2**30:.3g} GiB with the rates of {setup.gpu.name}, "
        f"each serving {setup.model.name}.\n"
        f"Scaled for this machine: 1 real byte stands for {scale.size} (a GPU takes {real:.0f} MiB here), 1 real "
        f"second for {scale.speed:g}; links are scaled with both.\n"
        f"Three runs of {layout.duration / scale.speed:.0f} s: static partition, borrowing, twice the memory. "
        "Ctrl-C ends everything.",
        highlight=False,
    )
    if layout.duration / scale.speed < SHORT:
        screen.print(f"Runs of less than {SHORT} s see few requests: do not compare them.", highlight=False)


def own_trace() -> Path:
    """Ten minutes of Azure's trace, as installed or in the repository."""
    packaged = Path(__file__).parents[1] / "traces" / TRACE
    return packaged if packaged.exists() else Path(__file__).parents[3] / "examples" / "traces" / TRACE


def _seed(seed: int) -> int:
    if seed < 0:
        raise InvalidInput.of("--seed", seed, "0 or more")
    return seed


def _whole_scale(scale: int) -> int:
    if not 1 <= scale <= 1 << 16 or scale & (scale - 1):
        raise InvalidInput.of("--scale", scale, "a power of two from 1 to 65536")
    return scale


def _writable(path: Path) -> None:
    new = not path.exists()
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()  # a run that is stopped leaves no empty picture
    except OSError as error:
        raise InvalidInput.of("--svg", str(path), f"a file that can be written ({error.strerror})") from error
