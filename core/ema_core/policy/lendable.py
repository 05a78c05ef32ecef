"""How many bytes a GPU may lend.

`used` never contains what was lent already, so the figures here do not depend on any lease.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from ema_core.ids import Place
from ema_core.plan import Cause
from ema_core.state import Gpu, PoolPolicy


def whole_chunks(size: int, chunk: int) -> int:
    """`size` bytes rounded down to whole chunks, never below 0."""
    return size // chunk * chunk if size > 0 else 0


def refusal(gpu: Gpu, draining: AbstractSet[Place]) -> Cause | None:
    """Why this GPU lends nothing at all, or None if it may lend."""
    if not gpu.healthy:
        return Cause.HEALTH
    if gpu.id in draining:
        return Cause.DRAIN
    if not gpu.lends:
        return Cause.HEADROOM
    return None


def unused(gpu: Gpu, pools: Sequence[PoolPolicy]) -> tuple[int, int]:
    """Bytes of the GPU that all leases together may keep, and up to which they may grow.

    `pools` are those that select the GPU; the largest headroom and the largest hysteresis among them count.
    """
    keep = gpu.total - gpu.reserved - gpu.used - max(pool.headroom for pool in pools)
    grow = keep - max(pool.hysteresis for pool in pools)
    return max(0, keep), max(0, grow)


def lendable(gpu: Gpu, pool: PoolPolicy, draining: AbstractSet[Place] = frozenset()) -> int:
    """Bytes that `pool`, were it alone, may have lent from `gpu`: whole chunks, never below 0.

    min(max_per_gpu, total - reserved - used - headroom); 0 for a GPU that is sick, draining, unwilling or not selected.
    """
    if gpu.id not in pool.gpus or refusal(gpu, draining) is not None:
        return 0
    keep, _ = unused(gpu, (pool,))
    return whole_chunks(min(keep, pool.max_per_gpu.get(gpu.id, 0)), pool.chunk)
