"""Activations that wait for their backward in a neighbour's memory.

`spill_activations` stands around forward and backward. The first steps are watched; from then on large saved tensors
leave by static programs while forward goes on, and are back before backward uses them. A step that goes another way
keeps what it saves in local memory, so that it is never wrong and never waits for what does not come.

Read on in `spill_context` (a step as it goes), `spill_plan` and `spill_choice` (what is spilled), `spill_rings` (the
way out and back) and `spill_guard` (when the agent is gone).
"""

from typing import TYPE_CHECKING

from ema import arguments, errors
from ema.torch.spill_choice import Wishes
from ema.torch.spill_context import Spill

if TYPE_CHECKING:
    from ema.pool import Pool


def spill_activations(
    pool: "Pool",
    *,
    fraction: float | str = "auto",
    budget: int | None = None,
    min_bytes: int = 1 << 20,
    slots: int = 6,
    in_place: bool = True,
    watch: str = "local",
    timeout: float = 2.0,
) -> Spill:
    """Let activations wait for their backward in neighbours' memory: `with` it around each forward and its backward.

    The first two steps are watched; once two in a row went the same way, tensors that are saved for backward and do not
    outlive the step leave as soon as they are saved, and are back before they are used.

    `fraction` of what can be spilled (0 to 1); "auto": as much as hides behind the step at the link's rate, and less
    if there is not so much to borrow. `budget`: bytes that are borrowed at most. `min_bytes`: smaller storages stay.
    `slots`: pieces under way at once, each way. `in_place`: what comes back may be used in its slot, if that was short
    enough in the steps that were watched; else it is copied first. `watch`: where steps that are not
    known keep what they save, "local" or in "host" memory, which is slow, but what does not fit can be learnt so.
    `timeout`: seconds that a given fraction may wait for memory.

    Raises BadInput. Entering it raises PoolFull, LimitReached or OutOfMemory where a given fraction is not to be had;
    nothing has changed then. Using a tensor that is lost raises AgentLost or DataLost, in backward.
    """
    if fraction != "auto" and (isinstance(fraction, bool | str) or not 0.0 <= fraction <= 1.0):
        raise errors.BadInput("fraction", repr(fraction), '"auto", or 0 to 1')
    if watch not in ("local", "host"):
        raise errors.BadInput("watch", repr(watch), '"local" or "host"')
    if watch == "host" and fraction == "auto":
        raise errors.BadInput("fraction", '"auto"', '0 to 1 with watch="host": times of such steps tell nothing')
    wishes = Wishes(
        fraction=None if isinstance(fraction, str) else float(fraction),
        budget=arguments.MOST if budget is None else arguments.whole("budget", budget, 0),
        slots=arguments.whole("slots", slots, 1, 64),
        in_place=bool(in_place),
        timeout=arguments.seconds("timeout", timeout),
    )
    return Spill(pool, wishes, arguments.whole("min_bytes", min_bytes, 1), aside=watch == "host")
