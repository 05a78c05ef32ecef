"""`ema up`: agent and policy in one process, for one machine without Kubernetes."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from ema_agent.agent import Agent
from ema_agent.metrics import Pages
from ema_agent.serve import FolderTaken, Options, claim, serve
from ema_cli.out import bad_input, fail, screen, size
from ema_cli.pool_file import read_pools
from ema_cli.sim_file import read_sim
from ema_core import places
from ema_core.api import MemoryPool
from ema_core.errors import InvalidInput
from ema_core.resolve import implausible
from ema_driver import open_node
from ema_driver.errors import DriverError, DriverUnavailable
from ema_driver.protocol import MemoryDriver
from ema_driver.sim import SimConfig, start


def up(  # noqa: PLR0917 (typer takes options as parameters)
    pool: Annotated[Path, typer.Option(help="MemoryPool file.")],
    driver: Annotated[str, typer.Option(help="`sim` for simulated GPUs; `cuda` for real ones.")] = "cuda",
    sim: Annotated[Path | None, typer.Option(help="What is simulated (sim.yaml); without it, 4 GPUs of 1 GiB.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the sockets go; also EMA_RUNTIME_DIR.")] = None,
    metrics: Annotated[
        str, typer.Option(help="ADDRESS:PORT of /metrics, /healthz, /readyz; `off`.")
    ] = "127.0.0.1:9464",
    socket_mode: Annotated[str, typer.Option(help="Who may connect: 600 only you, 660 your group, 666 all.")] = "600",
    loopback: Annotated[
        bool,
        typer.Option("--loopback", help="A GPU also lends to its own clients: for measurements where there is one."),
    ] = False,
) -> None:
    """Serve this machine's GPUs until Ctrl-C. Clients connect with `ema.connect()`."""
    with bad_input():
        pools = read_pools(pool)
        config = _simulated(driver, sim)
        options = Options(
            folder=folder or Path(places.runtime_folder(os.environ, os.getuid())),
            client_mode=_mode(socket_mode),
            pages=_address(metrics),
            loopback=loopback,
        )
    try:
        with bad_input():
            lock = claim(options.folder)
    except FolderTaken as taken:
        raise fail(str(taken)) from None
    except OSError as error:
        raise fail(
            f"folder: got {options.folder}; expected one that can be made and written ({error.strerror})", 2
        ) from None
    try:
        server = start(config, options.folder) if config is not None else None
        endpoint = str(server.socket) if server is not None else ""
        try:
            with open_node(driver, endpoint) as session:
                why = _serve(session, endpoint, pools, options)
        finally:
            if server is not None:
                server.close()
    except DriverUnavailable as error:
        raise fail(f"{error}. Without GPUs, try `--driver sim`.") from None
    except DriverError as error:
        raise fail(str(error)) from None
    finally:
        os.close(lock)
    if why is None:
        screen.print("Ended. Everything that was lent is given back.", highlight=False)
    else:
        raise fail(f"the GPUs' driver session is lost: {why}. What was lent is gone; start again.")


def _serve(session: MemoryDriver, endpoint: str, pools: list[MemoryPool], options: Options) -> str | None:
    if not session.devices():
        raise DriverUnavailable("the driver shows no GPU")
    for pool in pools:
        for warning in implausible(pool):
            screen.print(f"warning: {pool.metadata.name}: {warning}", highlight=False, markup=False)
    screen.print("Testing every pair of GPUs with a pattern …", highlight=False)
    with bad_input():
        return asyncio.run(serve(session, endpoint, pools, options, _announce))


def _announce(agent: Agent, pages: Pages | None) -> None:
    node = agent.node
    total = sum(d.total for d in node.devices.values())
    screen.print(
        f"Serving {len(node.devices)} GPUs ({agent.driver.name}, {size(total)}), {len(node.paths)} verified paths.",
        highlight=False,
    )
    for (source, target), why in node.barred.items():
        screen.print(f"barred: {source} → {target}: {why}", highlight=False, markup=False)
    screen.print(f"Clients: {agent.setup.folder / places.CLIENT_SOCKET}", highlight=False, soft_wrap=True)
    if pages is not None:
        screen.print(f"Metrics: http://{pages.address[0]}:{pages.address[1]}/metrics", highlight=False, soft_wrap=True)
    screen.print("Ready. `ema status` shows it; Ctrl-C ends it.", highlight=False)


def _simulated(driver: str, sim: Path | None) -> SimConfig | None:
    if driver == "sim":
        return read_sim(sim) if sim is not None else SimConfig()
    if sim is not None:
        raise InvalidInput.of("--sim", str(sim), "--driver sim beside it")
    if driver != "cuda":
        raise InvalidInput.of("--driver", driver, "sim or cuda")
    return None


def _mode(text: str) -> Literal[0o600, 0o660, 0o666]:
    modes: dict[str, Literal[0o600, 0o660, 0o666]] = {"600": 0o600, "660": 0o660, "666": 0o666}
    if text not in modes:
        raise InvalidInput.of("--socket-mode", text, "600, 660 or 666")
    return modes[text]


def _address(text: str) -> tuple[str, int] | None:
    if text == "off":
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidInput.of("--metrics", text, "ADDRESS:PORT such as 127.0.0.1:9464, or off")
    return host, int(port)
