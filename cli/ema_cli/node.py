"""Commands that ask a running agent: `ema status`, `ema leases`, `ema drain`."""

import json
import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from ema_cli.out import as_json, bad_input, fail, screen, size, table
from ema_core import places
from ema_core.errors import FieldError, InvalidInput

Folder = Annotated[Path | None, typer.Option(help="The agent's folder; also EMA_RUNTIME_DIR.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ANSWER = 10.0
"""Seconds to wait for an answer."""


class Agent:
    """A line to a running agent's administrator socket."""

    def __init__(self, folder: Path | None = None) -> None:
        path = (folder or Path(places.runtime_folder(os.environ, os.getuid()))) / places.ADMIN_SOCKET
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(ANSWER)
        try:
            self._sock.connect(str(path))
        except PermissionError:
            self._sock.close()
            raise fail(f"the agent at {path} is another user's; only that user may ask it") from None
        except OSError as error:
            self._sock.close()
            raise fail(f"no agent answers at {path} ({error.strerror}); start one with `ema up --pool POOL`") from None
        self._lines = self._sock.makefile("rb")

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """Send a request; its answer. Raises InvalidInput as the agent does."""
        try:
            self._sock.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise fail(f"the agent does not answer ({error.strerror or 'time ran out'})") from None
        if not line:
            raise fail("the agent has ended")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise InvalidInput([FieldError(e["field"], e["value"], e["expected"]) for e in answer["errors"]])
        return answer

    def close(self) -> None:
        """Hang up."""
        self._lines.close()
        self._sock.close()


def status(folder: Folder = None, json_: Json = False) -> None:
    """Show GPUs, what they lend, and who waits."""
    agent = Agent(folder)
    answer = agent.ask("status")
    agent.close()
    if json_:
        as_json(answer)
        return
    numbers = {g["id"]: str(g["index"]) for g in answer["gpus"]}
    gpus = sorted(answer["gpus"], key=lambda g: g["index"])
    for product, count in Counter(g["product"] for g in gpus).items():
        screen.print(f"{count} × {product} ({answer['driver']})", highlight=False, markup=False)
    rows = [
        [
            str(g["index"]),
            g["id"][:12],
            size(g["total"]),
            size(g["used"]),
            size(g["lent"]),
            size(g["free"]),
            g["sick"] or g["skipped"] or ("draining" if g["draining"] else "ok"),
        ]
        for g in gpus
    ]
    columns = ["GPU", "UUID", "memory", "used", "lent", "free", "state"]
    screen.print(table(columns, rows, right=columns[2:6]))
    host = answer["host"]
    spare = f", and {size(host['spare'])} are kept for the next ones" if host["spare"] else ""
    screen.print(
        f"host memory: {size(host['held'] - host['spare'])} of {size(host['room'])} hold lent bytes and their copies"
        f"{spare}",
        highlight=False,
    )
    screen.print(f"leases: {answer['leases']}, waiting: {len(answer['queue'])}", highlight=False)
    for pair in answer["barred"]:
        source, target = numbers.get(pair["source"], pair["source"]), numbers.get(pair["target"], pair["target"])
        screen.print(f"barred: {source} → {target}: {pair['why']}", highlight=False, markup=False)
    if answer["trouble"]:
        screen.print(f"not ready: {answer['trouble']}", highlight=False, markup=False)


def leases(folder: Folder = None, json_: Json = False) -> None:
    """Show every lease: what it may have, wants and has."""
    agent = Agent(folder)
    answer = agent.ask("leases")["leases"]
    numbers = {g["id"]: f"GPU {g['index']}" for g in agent.ask("status")["gpus"]}
    agent.close()
    if json_:
        as_json({"leases": answer})
        return
    rows = [
        [
            e["id"],
            numbers.get(e["gpu"], e["gpu"]),
            size(e["wanted"]),
            size(sum(e["held"].values())),
            "\n".join(f"{numbers.get(p, p)}: {size(n)}" for p, n in sorted(e["held"].items())) or "–",
            size(e["limit"]),
            _queued(e["position"], e["deadline"]),
        ]
        for e in answer
    ]
    columns = ["lease", "borrower", "wants", "has", "where", "limit", "queue"]
    screen.print(table(columns, rows, right=("wants", "has", "limit", "queue")))


def _queued(position: int | None, deadline: float | None) -> str:
    """Place in the queue, and how long the request waits at most."""
    if position is None:
        return "–"
    return str(position) if deadline is None else f"{position} ({deadline:.1f} s left)"


def drain(
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="Index or UUID.")],
    undo: Annotated[bool, typer.Option(help="Let the GPU lend again.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until it is empty.")] = 30.0,
    folder: Folder = None,
    json_: Json = False,
) -> None:
    """Move away what a GPU lends, and let it lend no more. Borrowers keep running."""
    agent = Agent(folder)
    with bad_input():
        answer = agent.ask("drain", gpu=gpu, undo=undo)
    began = time.monotonic()
    first = left = answer["left"]
    if not undo and not json_ and left:
        with Live(console=screen, transient=True) as live:
            while left and time.monotonic() - began < timeout:
                time.sleep(0.05)
                left = agent.ask("drain", gpu=gpu)["left"]
                live.update(f"GPU {gpu}: {size(left)} of {size(first)} left")
    while not undo and left and time.monotonic() - began < timeout:
        time.sleep(0.05)
        left = agent.ask("drain", gpu=gpu)["left"]
    agent.close()
    if json_:
        as_json({"gpu": answer["gpu"], "left": left, "draining": not undo})
    elif undo:
        screen.print(f"GPU {gpu} lends again.", highlight=False)
    elif left:
        raise fail(f"GPU {gpu} still lends {size(left)} after {timeout:g} s; it goes on emptying")
    else:
        screen.print(f"GPU {gpu} lends nothing any more; `ema drain {gpu} --undo` lets it lend again.", highlight=False)
    if left and not undo:
        raise typer.Exit(1)
