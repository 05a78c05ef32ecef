"""The `ema` command: one subcommand per thing a person does."""

from importlib.metadata import version
from typing import Annotated

import typer

from ema_cli.check import check
from ema_cli.demo.command import demo
from ema_cli.node import drain, leases, status
from ema_cli.replay import replay_command
from ema_cli.up import up

app = typer.Typer(
    name="ema",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ema {version('ema')}")
        raise typer.Exit


@app.callback()
def ema(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """GPUs in one server lend idle memory to each other."""


app.command("up")(up)
app.command("status")(status)
app.command("leases")(leases)
app.command("drain")(drain)
app.command("check")(check)
app.command("demo")(demo)
app.command("replay")(replay_command)


def run() -> None:
    """Entry point of the console script."""
    app()
