"""The steward carries plans out: it looks at the node, asks the policy, and moves memory until nothing is left to do.

It runs on the agent's loop and owns the ledger; driver work goes to worker threads (`backing`). Chunks on their way
count where they will be, and granted chunks count before their memory is made, so planning again in the middle is
always right.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from ema_agent.backing import Backing
from ema_agent.lease import Lease, Region
from ema_agent.ledger import Ledger
from ema_agent.listener import Listener
from ema_agent.moves import Moves
from ema_agent.node import Node
from ema_agent.work import Work
from ema_core.ids import LeaseId, Place, PoolName
from ema_core.plan import Grant, Plan, Waiting
from ema_core.policy import plan
from ema_core.state import Gpu, NodeState, PoolPolicy
from ema_driver.errors import DriverError

INF: Final = float("inf")


class Steward:
    """Plans and carries out."""

    def __init__(self, node: Node, ledger: Ledger, backing: Backing, listener: Listener) -> None:
        self.node, self.ledger, self.backing, self.listener = node, ledger, backing, listener
        self.waiting: dict[LeaseId, Waiting] = {}
        self.entitlement: dict[LeaseId, int] = {}
        self.overdue: dict[tuple[LeaseId, Place], int] = {}
        self.may_grant: Callable[[], bool] = lambda: True
        """Whether what is known of the node is fresh enough to lend by."""
        self.due = INF
        """When a plan can differ although nothing has happened: a `minHold` or a rest ends. Monotonic seconds."""
        self.settled = asyncio.Event()
        """Set whenever a plan found nothing to do and nothing is under way."""
        self.work = Work(self.wake)
        self.moves = Moves(node, ledger, backing, work=self.work, listener=listener, wake=self.wake)
        self._pools: dict[PoolName, PoolPolicy] = {}
        self._wake = asyncio.Event()

    @property
    def pools(self) -> dict[PoolName, PoolPolicy]:
        """The pools of this node, resolved."""
        return self._pools

    @pools.setter
    def pools(self, pools: dict[PoolName, PoolPolicy]) -> None:
        self._pools = pools
        self.moves.spare_limit = sum(p.host_lend + p.host_spill // 8 for p in pools.values())

    def wake(self) -> None:
        """Something changed: plan soon."""
        self.settled.clear()
        self._wake.set()

    async def run(self) -> None:
        """Plan whenever woken, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.round().empty and not self.work.under_way and not self._wake.is_set():
                self.settled.set()

    def state(self) -> NodeState:
        """The node at this moment."""
        resting = self.node.resting
        return NodeState(
            gpus=tuple(self._full(g) if g.id in resting else g for g in self.node.gpus()),
            paths=self.node.ways(),
            leases=self.ledger.policy_leases(),
            draining=frozenset(self.node.draining),
        )

    def round(self) -> Plan:
        """Plan once and start carrying it out."""
        now = time.monotonic()
        self.node.rested(now)
        outcome = plan(self.state(), tuple(self._pools.values()), now)
        self.listener.planned(outcome, time.monotonic() - now)
        self.waiting = {w.lease: w for w in outcome.waiting}
        self.entitlement = dict(outcome.entitlement or {})
        self.overdue = {(o.lease, o.place): o.size for o in outcome.overdue}
        self.moves.begin_drops(outcome.drops, now)
        self.moves.begin(outcome.moves, now)
        self._start_grants(outcome.grants, now)
        ends = (at for lease in self.ledger.leases.values() for at in self._ends(lease) if at > now)
        self.due = min(*ends, *self.node.resting.values(), INF, INF)
        return outcome

    def _full(self, gpu: Gpu) -> Gpu:
        """A resting GPU as one that keeps what it lends and has nothing more to lend."""
        headroom = max((p.headroom for p in self._pools.values() if gpu.id in p.gpus), default=0)
        most = gpu.total - gpu.reserved - headroom - self.ledger.lent[gpu.id]
        return Gpu(gpu.id, gpu.total, gpu.reserved, max(gpu.used, most), gpu.lends, gpu.healthy)

    def _ends(self, lease: Lease) -> tuple[float, float]:
        """When the two holds of a lease end; a moment later, so that a plan then surely finds them ended."""
        hold = self._pools[lease.pool].min_hold + 1e-3
        return lease.granted_at + hold, lease.reclaimed_at + hold

    def _start_grants(self, grants: Iterable[Grant], now: float) -> None:
        if not self.may_grant():
            return
        for grant in grants:
            lease = self.ledger.leases.get(grant.lease)
            if lease is None or grant.place in self.node.resting:
                continue
            count = grant.size // lease.chunk
            wanted = [w for w, _ in zip(lease.missing(droppable=grant.droppable), range(count), strict=False)]
            for region, index in wanted:
                self.ledger.promise(lease, region, index, grant.place)
            if wanted:
                lease.granted_at = now
                self.work.start(self._grant(lease, wanted, grant.place))

    async def _grant(self, lease: Lease, wanted: list[tuple[Region, int]], place: Place) -> None:
        await self.work.freeing(place)
        try:
            with self.node.changing({place}):
                fresh = await self.work.in_thread(self.backing.fresh, place, lease.chunk, len(wanted))
                self.moves.held(place, lease.chunk * len(wanted))
        except DriverError:
            self.node.rest(place)
            for region, index in wanted:
                self.ledger.withdraw(lease, region, index)
            self.wake()
            return
        unwanted = []
        for (region, index), f in zip(wanted, fresh, strict=True):
            if region.promised.get(index) == place:
                self.ledger.arrive(lease, region, index, address=f.address, gate=f.gate, handle=f.handle)
            else:
                unwanted.append(f)
        if unwanted:
            with self.node.changing({place}):
                await self.work.in_thread(self.backing.discard, unwanted)
                self.moves.held(place, -lease.chunk * len(unwanted))
        for region in {id(r): r for r, _ in wanted}.values():
            self.listener.granted(lease, region)
