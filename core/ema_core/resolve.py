"""From a pool as written to the pool on one node: percentages in bytes, GPUs by UUID; and what looks like a slip."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ema_core.api import MemoryPool, SpillTarget
from ema_core.ids import GpuId, PoolName
from ema_core.quantity import format_quantity
from ema_core.state import PoolPolicy

_HUGE = 16 * 2**40
"""No server's GPUs have this much together."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a pool's rules refer to in a GPU."""

    product: str
    total: int
    """Bytes."""


def resolve(pool: MemoryPool, gpus: Mapping[GpuId, GpuFacts]) -> PoolPolicy:
    """The pool's rules for a node with these GPUs. Amounts in bytes; sizes are per device, so GPUs may differ.

    A pool that selects none of them gives a policy without GPUs, under which nothing is lent.
    """
    spec = pool.spec
    products = frozenset(spec.gpus.products)
    chosen = {gpu: facts for gpu, facts in gpus.items() if not products or facts.product in products}
    return PoolPolicy(
        name=PoolName(pool.metadata.name),
        gpus=frozenset(chosen),
        max_per_gpu={gpu: spec.lending.max_per_gpu.of(facts.total) for gpu, facts in chosen.items()},
        headroom=spec.lending.headroom,
        hysteresis=spec.lending.hysteresis,
        chunk=spec.chunk_size,
        host_spill=spec.reclaim.host_memory if SpillTarget.HOST in spec.reclaim.spill_to else 0,
        host_lend=spec.lending.host,
        spill_to_peer=SpillTarget.PEER in spec.reclaim.spill_to,
        spill_to_host=SpillTarget.HOST in spec.reclaim.spill_to,
        spill_to_drop=SpillTarget.DROP in spec.reclaim.spill_to,
        min_hold=spec.reclaim.min_hold,
    )


def implausible(pool: MemoryPool) -> list[str]:
    """Sentences about values that are valid and probably not meant, such as a bare `1` where `1Gi` was."""
    spec = pool.spec
    amounts: dict[str, int | None] = {
        "spec.lending.maxPerGPU": spec.lending.max_per_gpu.amount,
        "spec.lending.host": spec.lending.host,
        "spec.lending.maxTraffic": spec.lending.max_traffic,
        "spec.borrowing.maxPerPod": spec.borrowing.max_per_pod,
        "spec.borrowing.guaranteedPerPod": spec.borrowing.guaranteed_per_pod,
        "spec.reclaim.hostMemory": spec.reclaim.host_memory,
        **{f"spec.borrowing.quotas[{quota.namespace}].max": quota.max for quota in spec.borrowing.quotas},
    }
    return [
        *_off_scale(amounts, spec.chunk_size),
        # Headroom may well be under a chunk, so it has its own scale.
        *_off_scale({"spec.lending.headroom": spec.lending.headroom}, min(spec.chunk_size, 2**20)),
        *_without_effect(pool),
    ]


def _off_scale(amounts: Mapping[str, int | None], least: int) -> Iterable[str]:
    for field, amount in amounts.items():
        if amount is None or amount == 0:
            continue
        if amount < least:
            yield (
                f"{field}: {format_quantity(amount)} is implausible, less than {format_quantity(least)}; "
                f"if a unit is missing, write for example {amount if amount < 1024 else 1}Gi"
            )
        elif amount > _HUGE:
            yield f"{field}: {format_quantity(amount)} is more than any server has; check the unit"


def _without_effect(pool: MemoryPool) -> Iterable[str]:
    spec = pool.spec
    if spec.chunk_size % (2 * 2**20):
        yield "spec.chunkSize: not a multiple of 2Mi; only simulated GPUs accept it"
    if SpillTarget.HOST not in spec.reclaim.spill_to or spec.reclaim.host_memory == 0:
        yield "spec.reclaim: without Host in spillTo and a hostMemory only droppable bytes can be lent"
