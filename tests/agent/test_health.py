"""Verdicts on GPUs: when one is sick, when it is well again, and what becomes of what it lends."""

from ema_agent.health import Health
from ema_core.ids import GpuId, Place
from ema_driver.protocol import HealthEvent, HealthKind
from ema_driver.sim import faults
from nodes import MIB, Node, until
from regions import right, stored

GPU = GpuId(Place("GPU-x"))


def test_an_xid_of_a_program_is_no_fault_of_the_gpu() -> None:
    it = Health(quiet=1.0)
    assert not it.report([HealthEvent(GPU, HealthKind.XID, 31)], 0.0)
    assert not it.verdicts
    assert not it.report([HealthEvent(GPU, HealthKind.XID, 79)], 0.0)
    assert it.verdicts == {GPU: "XID 79"}


def test_a_gpu_is_healthy_again_only_after_it_was_quiet() -> None:
    it = Health(quiet=1.0)
    it.report([HealthEvent(GPU, HealthKind.XID, 48)], 0.0)
    assert not it.clear([GPU], 30.0)
    it.report([HealthEvent(GPU, HealthKind.RECOVERED)], 30.0)
    assert not it.clear([GPU], 30.9)
    it.report([HealthEvent(GPU, HealthKind.XID, 48)], 30.9)
    it.report([HealthEvent(GPU, HealthKind.RECOVERED)], 31.0)
    assert not it.clear([GPU], 31.9), "it flapped: the pause begins anew"
    assert it.clear([GPU], 32.0) == {GPU}
    assert not it.verdicts


def test_an_xid_that_never_was_taken_back_is_forgotten_after_a_minute() -> None:
    it = Health(quiet=1.0)
    it.report([HealthEvent(GPU, HealthKind.XID, 48)], 0.0)
    assert not it.clear([GPU], 60.0)
    assert not it.clear([GPU], 61.0)
    assert it.clear([GPU], 62.0) == {GPU}


def test_a_gpu_that_is_enumerated_again_comes_back_without_an_event() -> None:
    it = Health(quiet=1.0)
    assert it.seen([GPU], [], 0.0) == {GPU}
    assert it.seen([GPU], [], 1.0) == set(), "told once"
    assert not it.clear([GPU], 10.0)
    it.seen([GPU], [GPU], 10.0)
    assert it.clear([GPU], 11.0) == {GPU}


def test_a_sick_gpu_is_emptied_and_its_bytes_are_right(node: Node) -> None:
    region = stored(node.connect(0), 6 * MIB)
    node.observer.inject(faults.Xid(gpu=1, code=31))
    node.observer.inject(faults.Xid(gpu=2, code=79))
    until(lambda: node.lent(2) == 0)
    assert node.lent(1) > 0
    assert right(region)
    assert node.on_loop(lambda: dict(node.agent.node.unhealthy)) == {node.gpus[2]: "XID 79 XID 79"}
