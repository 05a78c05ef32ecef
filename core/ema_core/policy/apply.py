"""What a node is after a plan was carried out."""

from dataclasses import replace

from ema_core.ids import HOST, LeaseId, Place
from ema_core.plan import Cause, Plan
from ema_core.state import Holding, Lease, NodeState

CLEAN, DIRTY, DROPPABLE = 0, 1, 2


class _Account:
    """One lease's bytes while the plan is applied."""

    __slots__ = ("granted", "lease", "places", "reclaimed", "used")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.places = {place: [h.clean, h.dirty, h.droppable] for place, h in lease.held.items()}
        self.used = {place: h.last_used for place, h in lease.held.items()}
        self.granted = self.reclaimed = False

    def take(self, place: Place, size: int, droppable: bool) -> list[tuple[int, int]]:
        """Remove bytes, clean before dirty; returns what they were."""
        here = self.places.get(place, [0, 0, 0])
        taken = []
        for kind in (DROPPABLE,) if droppable else (CLEAN, DIRTY):
            part = min(size, here[kind])
            if part:
                here[kind] -= part
                size -= part
                taken.append((kind, part))
        if size:
            kind_name = "droppable" if droppable else "kept"
            raise ValueError(f"plan: lease {self.lease.id} holds {size} {kind_name} bytes too few at {place}")
        return taken

    def put(self, place: Place, kind: int, size: int, used: float) -> None:
        """Add bytes."""
        self.places.setdefault(place, [0, 0, 0])[kind] += size
        self.used[place] = max(used, self.used.get(place, used))

    def settled(self, now: float) -> Lease:
        """The lease as it is now."""
        held = {
            place: Holding(clean, dirty, droppable, self.used[place])
            for place, (clean, dirty, droppable) in self.places.items()
            if clean or dirty or droppable
        }
        return replace(
            self.lease,
            held=held,
            granted_at=now if self.granted else self.lease.granted_at,
            reclaimed_at=now if self.reclaimed else self.lease.reclaimed_at,
        )


def apply(state: NodeState, plan: Plan, now: float) -> NodeState:
    """The state after `plan` was carried out at `now`.

    Kept bytes that come back from host memory leave their copy there: they arrive clean. A lease counts as
    *granted* when it got new bytes or was promoted, as *reclaimed* when bytes were dropped or went to host memory; a
    move from one lender to another is neither.

    Raises ValueError if the plan takes what a lease does not hold, or names a lease that is not there.
    """
    leases = {lease.id: lease for lease in state.leases}
    open_accounts: dict[LeaseId, _Account] = {}

    def account(lease: LeaseId) -> _Account:
        if lease not in open_accounts:
            if lease not in leases:
                raise ValueError(f"plan: no lease {lease} on this node")
            open_accounts[lease] = _Account(leases[lease])
        return open_accounts[lease]

    for drop in plan.drops:
        loser = account(drop.lease)
        loser.take(drop.place, drop.size, droppable=True)
        loser.reclaimed = True
    for move in plan.moves:
        mover = account(move.lease)
        used = mover.used.get(move.source, now)
        for kind, size in mover.take(move.source, move.size, move.droppable):
            arrives = kind
            if kind != DROPPABLE and HOST in (move.source, move.target):
                arrives = CLEAN if move.source == HOST else DIRTY
            mover.put(move.target, arrives, size, used)
        mover.granted |= move.cause is Cause.PROMOTE
        mover.reclaimed |= move.target == HOST
    for grant in plan.grants:
        taker = account(grant.lease)
        taker.put(grant.place, DROPPABLE if grant.droppable else DIRTY, grant.size, now)
        taker.granted = True
    if not open_accounts:
        return state
    return replace(
        state,
        leases=tuple(
            open_accounts[lease.id].settled(now) if lease.id in open_accounts else lease for lease in state.leases
        ),
    )
