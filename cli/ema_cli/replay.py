"""`ema replay`: what a request trace would gain from borrowing, in virtual time, before anything is installed."""

from pathlib import Path
from typing import Annotated

import typer

from ema_cli.out import as_json, bad_input, complain, screen, write_picture
from ema_cli.pool_file import read_pool
from ema_cli.replay_report import as_object, picture, table
from ema_cli.serving.options import active_of, rate_of, requests_of
from ema_cli.serving.presets import find_gpu, find_model
from ema_cli.serving.replay import Setup, replay
from ema_core.quantity import parse_duration
from ema_core.resolve import implausible


def replay_command(  # noqa: PLR0917 (typer takes options as parameters)
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Azure CSV or Mooncake JSONL, plain or gzipped.")],
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
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a request trace in virtual time: static partition, borrowing and twice the memory side by side."""
    with bad_input():
        setup = Setup(
            requests=requests_of("TRACE", trace),
            pool=read_pool(pool),
            model=find_model(model),
            gpu=find_gpu(gpu),
            link=link,
            gpus=gpus,
            active=active_of(active, gpus),
            cycles=cycles,
            rate=rate_of(rate),
            patience=parse_duration(patience, "--patience"),
            seed=seed,
        )
        report = replay(setup)
    for warning in implausible(setup.pool):
        complain(f"warning: {warning}")
    with bad_input():
        write_picture(svg_path, picture(report))
    if json_:
        as_json(as_object(report))
    else:
        screen.print(table(report))
        typer.echo(f"picture: {svg_path}")
    for shortfall in report.shortfalls:
        complain(shortfall)
    if report.shortfalls:
        raise typer.Exit(1)
