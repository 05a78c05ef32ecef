"""Losses: what becomes of chunks whose GPU is gone.

Bytes with a true copy in host memory go there with the next plan. Droppable ones are dropped. The others are lost:
their gates stay closed, and their owner is told, so that nobody can use what is not there.
"""

import time
from collections.abc import Callable, Sequence

from ema_agent.gates import Gates
from ema_agent.lease import Chunk, Lease, Region, State
from ema_agent.ledger import Ledger
from ema_agent.node import Node
from ema_agent.steward import Steward
from ema_core.ids import GpuId, LeaseId
from ema_core.plan import Cause

Tell = Callable[[Lease, Region, Sequence[int], str], None]


class Losses:
    """Belongs to the agent's loop."""

    def __init__(self, node: Node, ledger: Ledger, gates: Gates, steward: Steward, tell: Tell) -> None:
        self._node, self._ledger, self._gates, self._steward, self._tell = node, ledger, gates, steward, tell

    def lose(self, gpu: GpuId, why: str) -> None:
        """A GPU is gone, and the bytes on it."""
        self._node.lost[gpu] = why
        self._node.unhealthy.setdefault(gpu, why)
        self._sweep(gpu)
        self._steward.wake()

    def sweep(self) -> None:
        """Look again at the GPUs that are gone: bytes may have been on their way there when it happened."""
        for gpu in self._node.lost:
            self._sweep(gpu)

    def _sweep(self, gpu: GpuId) -> None:
        lost: dict[tuple[LeaseId, int], list[Chunk]] = {}
        dropped: dict[LeaseId, list[Chunk]] = {}
        for c in list(self._ledger.chunks()):
            if c.place != gpu or c.state not in {State.DIRTY, State.CLEAN} or c.busy:
                continue  # a busy one is copied just now, or its borrower gives it back
            if c.droppable:
                dropped.setdefault(c.lease.id, []).append(c)
            elif not c.has_true_twin:
                lost.setdefault((c.lease.id, c.region.number), []).append(c)
            elif c.state is State.DIRTY:
                self._ledger.become(c, State.CLEAN)
        for chunks in dropped.values():
            self._steward.moves.drop(chunks, Cause.HEALTH, time.monotonic())
        for chunks in lost.values():
            self._give_up(chunks, gpu)

    def _give_up(self, chunks: list[Chunk], gpu: GpuId) -> None:
        self._gates.close([c.gate for c in chunks])
        for c in chunks:
            self._ledger.become(c, State.LOST)
            self._node.held(gpu, -c.size)
        first = chunks[0]
        self._tell(first.lease, first.region, [c.index for c in chunks], f"{gpu}: {self._node.lost[gpu]}")
