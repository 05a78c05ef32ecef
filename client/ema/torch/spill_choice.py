"""How much is spilled, and which tensors: as much as hides, as was asked for, or as there is to borrow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ema import errors
from ema.torch.spill_plan import LARGEST_OUT, Learnt, copies, pieces, places, slot_size, spread
from ema.torch.spill_rings import Rings
from ema_core import wire

if TYPE_CHECKING:
    from ema.pool import Pool


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for."""

    fraction: float | None
    """Of what can be spilled; None: as much as hides, and less if there is not so much."""
    budget: int
    """Bytes that are borrowed at most."""
    slots: int
    in_place: bool
    """What comes back may be used in its slot."""
    timeout: float
    """Seconds that a request for memory may wait."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is spilled of a learnt step, ready to go."""

    rings: Rings | None
    items: frozenset[int]
    limited: str
    """Why it is less than was wished for; empty if it is not."""


def choose(learnt: Learnt, wishes: Wishes, pool: "Pool") -> Choice:
    """Make ready on a connection of its own. Raises AgentLost; with a given fraction what keeps it from being had."""
    sizes, slots, timeout, limited = learnt.sizes, wishes.slots, wishes.timeout, ""
    passing = [sizes[i] for i in learnt.spillable(0)]
    slot_bytes = slot_size(passing, slots, pool.granularity) if passing else pool.granularity
    out_bytes = min(slot_bytes, -(-LARGEST_OUT // pool.granularity) * pool.granularity)
    items = learnt.spillable(slots * slot_bytes)
    total = sum(sizes[i] for i in items)
    wanted = learnt.hidden(pool.rate) if wishes.fraction is None else int(total * wishes.fraction)
    wanted = min(wanted, wishes.budget, total)
    while out := spread(sizes, items, wanted):
        chosen = frozenset(out)
        back = [i for i in learnt.order if i in chosen]
        at, _ = places(sizes, out)
        if copies(pieces(sizes, out, at, slots, out_bytes), pool.chunk) > wire.MAX_COPIES:
            limited = f"a step makes at most {wire.MAX_COPIES} copies each way"
            wanted = wanted * 9 // 10
            continue
        try:
            rings = Rings(
                pool,
                sizes,
                out=out,
                back=back,
                passing=learnt.passing(back, slots) if wishes.in_place else frozenset(),
                slots=slots,
                slot_bytes=(out_bytes, slot_bytes),
                timeout=timeout,
            )
        except (errors.PoolFull, errors.LimitReached, errors.OutOfMemory) as error:
            if wishes.fraction is not None:
                raise
            limited, timeout = str(error), 0.0
            wanted = sum(sizes[i] for i in out) // 2
            continue
        return Choice(rings, chosen, limited)
    return Choice(None, frozenset(), limited)
