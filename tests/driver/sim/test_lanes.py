"""Time on links: a copy ends no earlier than its link allows, and lanes do not share."""

import time
from collections.abc import Callable

import msgspec

from driver.gates import window
from driver.sim.conftest import MIB, SMALL
from ema_core.ids import HOST
from ema_driver.protocol import Copy
from ema_driver.sim import SimConfig, SimDriver, SimServer

SLOW = msgspec.structs.replace(SMALL, nvlink_rate=200 * MIB, pcie_rate=100 * MIB, latency=1e-3)


def took(driver: SimDriver, *copies: tuple[int, int, int]) -> float:
    """Seconds for copies (target, source, size), each on a stream of its own."""
    streams = [driver.stream(driver.devices()[0].id) for _ in copies]
    began = time.monotonic()
    for stream, copy in zip(streams, copies, strict=True):
        stream.enqueue([Copy(*copy)])
    assert all(stream.synchronize(10) for stream in streams)
    return time.monotonic() - began


def test_a_copy_ends_no_earlier_than_its_link_allows(serve: Callable[[SimConfig], SimServer]) -> None:
    with SimDriver.connect(serve(SLOW).socket) as driver:
        a, b, _ = (device.id for device in driver.devices())
        on_a, on_b, on_host = (window(driver, place, 16 * MIB)[0] for place in (a, b, HOST))
        assert took(driver, (on_a, on_b, 10 * MIB)) >= 0.05 + 1e-3
        assert took(driver, (on_a, on_host, 10 * MIB)) >= 0.1 + 1e-3
        assert took(driver, (on_a, on_b, 64)) >= 1e-3


def test_copies_on_one_lane_share_it_and_lanes_do_not(serve: Callable[[SimConfig], SimServer]) -> None:
    with SimDriver.connect(serve(msgspec.structs.replace(SLOW, nvlink_rate=50 * MIB)).socket) as driver:
        a, b, c = (device.id for device in driver.devices())
        on_a, on_b, on_c = (window(driver, place, 32 * MIB)[0] for place in (a, b, c))
        size = 16 * MIB
        assert took(driver, (on_a, on_b, size), (on_a + size, on_b + size, size)) >= 0.64
        apart = took(driver, (on_a, on_b, size), (on_a + size, on_c, size), (on_b, on_a, size))
        assert 0.32 <= apart < 0.64


def test_without_delays_a_link_takes_no_time_of_its_own(serve: Callable[[SimConfig], SimServer]) -> None:
    config = msgspec.structs.replace(SLOW, nvlink_rate=20 * MIB, link_delays=False)
    with SimDriver.connect(serve(config).socket) as driver:
        a, b, _ = (device.id for device in driver.devices())
        on_a, on_b = (window(driver, place, 32 * MIB)[0] for place in (a, b))
        assert took(driver, (on_a, on_b, 32 * MIB)) < 1.0
