"""The `ema` command: one subcommand per thing a person does."""

import typer

from ema_cli.check import check
from ema_cli.demo.command import demo
from ema_cli.node import drain, leases, status
from ema_cli.replay import replay_command
from ema_cli.up import up

app = typer.Typer(
    name="ema",
    help="GPUs in one server lend idle memory to each other.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
