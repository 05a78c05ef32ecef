"""The lender's side of a session: the client's own GPU gives its memory back before the client takes it.

A GPU that a client runs on lends only once the client has opted in by a share: others look at free memory when they
start, and would see lent bytes as used.
"""

import time
from dataclasses import dataclass
from typing import Final

from ema_agent.line import Line
from ema_agent.node import Node
from ema_agent.programs import Refusal
from ema_agent.regions import LONGEST
from ema_core import wire
from ema_core.ids import GpuId
from ema_core.wire import Kinds

READING: Final = 0.25
"""Seconds that a reading of memory may take: nobody is refused for want of one."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request for the GPU's own memory."""

    request: int
    size: int
    deadline: float


class OwnShare:
    """What this client was promised of its own GPU and what it has mapped by now. Belongs to the agent's loop."""

    def __init__(self, gpu: GpuId, node: Node, line: Line) -> None:
        self._gpu, self._node, self._line = gpu, node, line
        self.waiters: list[Waiter] = []
        self.mapped = 0
        self._granted = 0
        self.opted_in = False
        node.withheld[gpu] += 1

    @property
    def promised(self) -> int:
        """Bytes that nobody else may have: promised, and not mapped yet."""
        return max(0, self._granted - self.mapped)

    def grow(self, message: wire.GrowShare) -> None:
        """Promise `size` bytes in all; answered when they are free."""
        info = self._node.memory.get(self._gpu)
        most = info.total - info.reserved if info is not None else 0
        if not 0 <= message.size <= most:
            raise Refusal.bad("size", message.size, f"0 to the GPU's {most} bytes")
        if not message.timeout >= 0.0:
            raise Refusal.bad("timeout", message.timeout, "0 or more seconds")
        if self.waiters:
            raise Refusal(Kinds.BUSY, "the share is growing: wait for that answer first")
        self._opt_in()
        self._set(message.size, self.mapped)
        self._node.outdate(self._gpu)  # somebody may have taken memory since it was read
        now = time.monotonic()
        self.waiters.append(Waiter(message.id, message.size, now + min(message.timeout, LONGEST)))
        self.look(now)

    def mapped_is(self, message: wire.ShareIs) -> None:
        """The client has this much mapped now."""
        if message.size < 0:
            raise Refusal.bad("size", message.size, "0 or more bytes")
        self._opt_in()
        if (taken := min(message.size - self.mapped, self.promised)) > 0:
            self._node.mapped(self._gpu, taken)
        self._set(self._granted if self.waiters else message.size, message.size)

    def look(self, now: float) -> None:
        """A new reading of memory has come, or time has passed."""
        free, known = self._node.free(self._gpu), self._node.quiet_now(self._gpu)
        for waiter in list(self.waiters):
            # Another client's promise on this GPU comes out of the same free bytes. A reading from before a grant was
            # made would count bytes that are gone by now.
            if known and free >= self._node.promised[self._gpu]:
                self.waiters.remove(waiter)
                self._line.send(wire.Done(waiter.request, waiter.size))
            elif now >= waiter.deadline + (0.0 if known else READING):
                self.waiters.remove(waiter)
                need = self.promised
                self._set(self.mapped, self.mapped)
                text = f"{need} bytes are not free on {self._gpu} ({free} are), and nothing lent is left to take back"
                self._line.refuse(waiter.request, Refusal(Kinds.MEMORY, text))

    def end(self) -> None:
        """The client is gone: nothing is promised any more, and its GPU may lend."""
        self.waiters.clear()
        self._set(0, 0)
        self._opt_in()

    def _opt_in(self) -> None:
        if not self.opted_in:
            self.opted_in = True
            self._node.withheld[self._gpu] -= 1

    def _set(self, granted: int, mapped: int) -> None:
        before = self.promised
        self._granted, self.mapped = granted, mapped
        self._node.promised[self._gpu] += self.promised - before
