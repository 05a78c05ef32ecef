"""What a session's parts share to talk to its client: answers, events, refusals, and work that is answered later."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from ema_agent.connection import Connection
from ema_agent.programs import Refusal
from ema_core import wire
from ema_core.wire import Kinds
from ema_driver.errors import DriverError


class Line:
    """One client's connection, seen from its session."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unanswered(self) -> int:
        """Requests whose work goes on."""
        return len(self._tasks)

    def send(self, message: wire.AgentMessage, fds: Sequence[int] = ()) -> None:
        """Answer."""
        self.connection.send(message, fds)

    def tell(self, message: wire.AgentMessage) -> None:
        """Send an event, which may be left out if the client does not read."""
        self.connection.tell(message)

    def refuse(self, request: int, why: Refusal) -> None:
        """Answer that it cannot be."""
        word, seq = why.run
        self.send(
            wire.Refused(
                request, why.kind, why.message, why.field, why.value, why.expected, why.position, word=word, seq=seq
            )
        )

    def later(self, request: int, work: Coroutine[Any, Any, int | None]) -> None:
        """Answer when the work has ended: with its value, not at all for None, or with what it was refused for."""

        async def answer() -> None:
            try:
                if (value := await work) is not None:
                    self.send(wire.Done(request, value))
            except Refusal as refusal:
                self.refuse(request, refusal)
            except DriverError as error:
                self.refuse(request, Refusal(Kinds.INTERNAL, f"the driver refused: {error}"))

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def hang_up(self) -> None:
        """Wait for work that goes on; nobody hears its answers any more."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))
