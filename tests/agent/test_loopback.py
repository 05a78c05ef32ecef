"""Where there is one GPU, it can be made to lend to its own clients, so that lending can be measured there."""

from pathlib import Path

import pytest

import ema
from ema_driver.sim import GpuGroup
from nodes import MIB, Node, pattern, sim

ONE = sim(gpus=(GpuGroup(count=1, memory=64 * MIB),), link_delays=False)


def test_the_only_gpu_lends_to_its_own_client_and_takes_back(tmp_path: Path) -> None:
    node = Node(tmp_path, ONE, loopback=True)
    try:
        lender, borrower = (ema.connect(node.socket) for _ in range(2))
        with lender, borrower:
            borrower.share(MIB).grow(0)  # it opts in: its GPU lends while it runs
            own = lender.share(60 * MIB)
            own.grow(4 * MIB)
            region = borrower.region(24 * MIB)
            assert region.rate > 0
            data = pattern(1, 24 * MIB)
            region.store(data, at=0)
            assert node.lent(0) == 24 * MIB
            own.grow(56 * MIB)
            assert node.lent(0) < 24 * MIB
            back = bytearray(24 * MIB)
            region.fetch(0, back)
            assert back == data
    finally:
        node.close()


def test_otherwise_a_gpu_lends_nothing_to_its_own_client(tmp_path: Path) -> None:
    node = Node(tmp_path, ONE)
    try:
        with ema.connect(node.socket) as client:
            client.share(MIB).grow(0)
            with pytest.raises(ema.LimitReached):
                client.region(MIB)
    finally:
        node.close()
