"""What a plan is: amounts to grant, move and drop. `ema_core.policy.plan` makes one, the agent carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from ema_core.ids import LeaseId, Place


class Cause(StrEnum):
    """Why bytes are taken from where they are."""

    HEADROOM = "headroom"
    """The lender's own demand: free memory fell under headroom."""
    LIMIT = "limit"
    """The GPU lends more than the pool allows by now."""
    DRAIN = "drain"
    """The GPU is being emptied by an administrator."""
    HEALTH = "health"
    """The GPU is sick."""
    PRIORITY = "priority"
    """A lease of higher priority, or a guaranteed amount, needs the bytes."""
    FAIRNESS = "fairness"
    """A lease holds more than its entitlement while an equal waits."""
    PROMOTE = "promote"
    """From host memory back to a GPU that has room."""
    SHRINK = "shrink"
    """The lease holds more than its limit."""


class Grant(msgspec.Struct, frozen=True, gc=False):
    """Create `size` bytes for `lease` at `place`."""

    lease: LeaseId
    place: Place
    size: int
    droppable: bool


class Move(msgspec.Struct, frozen=True, gc=False):
    """Move `size` bytes of `lease` from `source` to `target` (a GPU or `HOST`)."""

    lease: LeaseId
    source: Place
    target: Place
    size: int
    droppable: bool
    cause: Cause


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Drop `size` droppable bytes of `lease` at `place`; the borrower is told before it can use them."""

    lease: LeaseId
    place: Place
    size: int
    cause: Cause


class Overdue(msgspec.Struct, frozen=True, gc=False):
    """`size` bytes that must leave `place` and have nowhere to go."""

    lease: LeaseId
    place: Place
    size: int
    cause: Cause


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A lease whose demand is not met: `short` bytes, and its place in the queue (0 is next)."""

    lease: LeaseId
    short: int
    position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now: first `drops`, then `moves` in their order, then `grants`.

    Each may count on the room that those before it make.
    """

    moves: tuple[Move, ...] = ()
    drops: tuple[Drop, ...] = ()
    grants: tuple[Grant, ...] = ()
    overdue: tuple[Overdue, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    entitlement: Mapping[LeaseId, int] | None = None
    """Bytes each lease is entitled to, from guaranteed amounts, priority and weight."""

    @property
    def empty(self) -> bool:
        """Nothing to carry out."""
        return not (self.moves or self.drops or self.grants)
