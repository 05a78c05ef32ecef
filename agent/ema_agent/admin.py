"""The administrator's socket: one line of JSON asks, one line answers. Only the agent's own user can open it."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from ema_agent.agent import Agent
from ema_agent.connection import SHOWN
from ema_agent.report import leases, status
from ema_core.api import load_pools
from ema_core.errors import InvalidInput
from ema_core.resolve import implausible
from ema_driver.errors import DriverError

LINE: Final = 1 << 20
"""Bytes of a request at most."""


class Admin:
    """Answers `status`, `leases`, `drain`, `reload`, and for simulated GPUs `inject` and `clear`."""

    def __init__(self, agent: Agent, path: Path) -> None:
        self._agent, self._path = agent, path
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=LINE)
        finally:
            os.umask(mask)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            with suppress(FileNotFoundError):
                self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(self._answer(line)).encode() + b"\n")
                await writer.drain()
        except (ValueError, ConnectionError):
            pass  # A line that is too long, or a client that left: it costs this connection only.
        finally:
            writer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = self._read(line)
            if not isinstance(request, dict):
                raise InvalidInput.of("request", request, "an object with a field `do`")
            return {"ok": True, **self._do(request)}
        except InvalidInput as refused:
            return {"ok": False, "errors": [_plain(e.field, e.value, e.expected) for e in refused.errors]}
        except DriverError as error:
            return {
                "ok": False,
                "errors": [_plain("driver", self._agent.driver.name, f"to do it; it refused: {error}")],
            }

    @staticmethod
    def _read(line: bytes) -> object:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput.of("request", line[:80].decode(errors="replace"), f"JSON: {error}") from None

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        agent = self._agent
        match request.get("do"):
            case "status":
                return status(agent, time.monotonic())
            case "leases":
                return {"leases": leases(agent, time.monotonic())}
            case "drain":
                gpu = agent.node.find_gpu(str(request.get("gpu", "")))
                undo = request.get("undo", False)
                if not isinstance(undo, bool):
                    raise InvalidInput.of("undo", undo, "true or false")
                left = agent.drain(gpu, undo=undo)
                return {"gpu": gpu, "left": left, "draining": gpu in agent.node.draining}
            case "reload":
                documents = request.get("pools")
                if not isinstance(documents, list):
                    raise InvalidInput.of("pools", documents, "a list of MemoryPool documents")
                pools = load_pools(documents)
                agent.pools.use(pools)
                return {
                    "pools": [p.metadata.name for p in pools],
                    "warnings": [w for p in pools for w in implausible(p)],
                }
            case "inject" | "clear" as verb:
                return self._fault(verb, request.get("fault"))
            case other:
                raise InvalidInput.of("do", other, "status, leases, drain, reload, inject or clear")

    def _fault(self, verb: str, fault: object) -> dict[str, Any]:
        from ema_driver.sim import Fault, SimDriver  # noqa: PLC0415 - only simulated GPUs have faults to inject

        driver = self._agent.driver
        if not isinstance(driver, SimDriver):
            raise InvalidInput.of("driver", driver.name, "sim: real GPUs are not made to fail")
        try:
            known = msgspec.convert(fault, Fault)
        except msgspec.ValidationError as error:
            raise InvalidInput.of("fault", fault, f"a fault of sim.yaml: {error}") from None
        if verb == "inject":
            driver.inject(known)
        else:
            driver.clear(known)
        return {}


def _plain(field: str, value: object, expected: str) -> dict[str, str]:
    return {"field": field, "value": str(value)[:SHOWN], "expected": expected}
