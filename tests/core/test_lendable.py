"""What a GPU lends is a matter of its bytes, whichever way the driver counts them."""

import pytest

from ema_core.api import load_pools
from ema_core.ids import HOST, GpuId, LeaseId, Place, PoolName
from ema_core.policy import lendable, plan
from ema_core.resolve import GpuFacts, resolve
from ema_core.state import Gpu, Lease, NodeState, PoolPolicy

GI, MI = 2**30, 2**20
SMALL, BIG, OWN = GpuId(Place("GPU-small")), GpuId(Place("GPU-big")), GpuId(Place("GPU-own"))


def policy(**totals: int) -> PoolPolicy:
    document = {
        "apiVersion": "ema.dev/v1alpha1",
        "kind": "MemoryPool",
        "metadata": {"name": "p"},
        "spec": {"lending": {"maxPerGPU": "100%", "hysteresis": 0}, "reclaim": {"hostMemory": "200Gi"}},
    }
    gpus = {GpuId(Place(f"GPU-{name}")): GpuFacts("any", total) for name, total in totals.items()}
    return resolve(load_pools([document])[0], gpus)


@pytest.mark.parametrize("reserved", [450 * MI, 0], ids=["newer query", "older query, which counts it as used"])
def test_lendable_is_total_less_reserved_used_and_headroom(reserved: int) -> None:
    used = 10 * GI + 450 * MI - reserved
    pool = policy(big=80 * GI)
    assert (
        lendable(Gpu(BIG, 80 * GI, reserved, used), pool) == (80 * GI - 450 * MI - 10 * GI - GI) // (64 * MI) * 64 * MI
    )


def test_forty_of_a_sixteen_and_an_eighty_gib_gpu_come_from_the_second_only() -> None:
    state = NodeState(
        gpus=(Gpu(SMALL, 16 * GI, 0, 0), Gpu(BIG, 80 * GI, 0, 0), Gpu(OWN, 80 * GI, 0, 80 * GI)),
        paths={(lender, OWN): 10**9 for lender in (SMALL, BIG, HOST)} | {(BIG, HOST): 10**9, (SMALL, HOST): 10**9},
        leases=(Lease(LeaseId("l"), PoolName("p"), OWN, limit=40 * GI, kept=40 * GI),),
    )
    decided = plan(state, (policy(small=16 * GI, big=80 * GI, own=80 * GI),), 0.0)
    assert {grant.place for grant in decided.grants} == {BIG}
    assert sum(grant.size for grant in decided.grants) == 40 * GI
