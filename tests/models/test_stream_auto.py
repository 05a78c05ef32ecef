"""`resident="auto"`: as much is remote as hides, found by trying."""

import random
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
import ema.torch
from ema.torch.layout import lay, slots_for
from ema.torch.tuner import TOLERANCE, TRIES, Tuner
from ema_driver.sim import GpuGroup
from models.streaming import same, state
from nodes import MIB, Node, node, pool, sim


@pytest.mark.parametrize("rate", [2e9, 1e9, 0.3e9])
def test_it_finds_what_hides(rate: float) -> None:
    """The link is really at 1e9 bytes a second, a local step takes 10 ms: 10 MB hide."""
    dice = random.Random(8)
    for most in (2_000_000, 9_000_000, 60_000_000):
        tuner = Tuner(most)
        remote, tries = tuner.begin(0.010, rate), 0
        while not tuner.settled:
            remote = tuner.tried(remote, max(0.010, remote / 1e9) * dice.uniform(0.99, 1.01))
            tries += 1
        assert tries <= TRIES
        assert min(most, 7_000_000) <= remote <= min(most, 10_000_000 * (1 + TOLERANCE) * 1.01)


def test_it_does_with_less_where_less_is_to_be_had() -> None:
    tuner = Tuner(100)
    remote = tuner.begin(1.0, 80.0)
    while not tuner.settled:
        remote = tuner.not_to_be_had(remote) if remote > 30 else tuner.tried(remote, 1.0)
    assert 20 <= remote <= 30
    nothing = Tuner(100)
    remote = nothing.begin(1.0, 80.0)
    while not nothing.settled:
        remote = nothing.not_to_be_had(remote)
    assert remote == 0


def test_layouts() -> None:
    for count in range(1, 70):
        for slots in range(1, 9):
            found = slots_for(count, slots)
            assert found <= count
            assert count % found != 1 or found in {1, count}
            sizes = [10_000 + 512 * i for i in range(count)]
            for resident in (0.0, 0.37, 0.9, 1.0):
                layout = lay(sizes, resident, order=range(count), slots=slots, grain=4096)
                end = 0
                for i in layout.order:
                    one = layout.slices[i]
                    assert one.local % 4096 == 0
                    assert one.local >= resident * sizes[i]
                    assert one.local + one.size == sizes[i]
                    assert one.size <= layout.slot_bytes
                    assert one.at >= end
                    end = one.at + one.size
                assert layout.region == end
                assert layout.remote == sum(s.size for s in layout.slices.values())


class Slow(nn.Module):
    """A layer that takes its time, as on a GPU that computes."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(width, width, bias=False), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.inner(x))


@pytest.fixture(scope="module")
def slow_links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Links take their time: 50 MB/s."""
    gpus = (GpuGroup(count=3, memory=64 * MIB),)
    config = sim(gpus=gpus, granularity=4096, nvlink_rate=50_000_000, pcie_rate=50_000_000)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="256Ki")) as it:
        yield it


@torch.no_grad()
def test_a_model_finds_its_cut(slow_links: Node) -> None:
    with ema.connect(slow_links.socket, gpu=slow_links.gpus[0]) as client:
        torch.manual_seed(9)
        model = nn.Sequential(*(Slow(256, 0.002) for _ in range(8)))  # 2 MiB; 0.8 MB hide behind 16 ms
        x, before = torch.randn(2, 256), state(model)
        wanted = model(x)
        ema.torch.stream(model, client)
        assert ema.torch.report(model).resident == 1.0
        remote = set()
        for _ in range(90):
            assert torch.equal(model(x), wanted)
            remote.add(ema.torch.report(model).remote_bytes)
        told = ema.torch.report(model)
        assert len(remote) > 1
        assert told.steps == 90
        assert 0.0 < told.resident < 1.0
        assert told.saved_bytes > 0
        assert told.remote_bytes <= 2 * 50e6 * told.step_seconds
        same(model.state_dict(), before)
        ema.torch.unstream(model)
        same(model.state_dict(), before)
        assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_casts_and_new_weights_before_the_first_cut(slow_links: Node) -> None:
    with ema.connect(slow_links.socket, gpu=slow_links.gpus[0]) as client:
        model = nn.Sequential(*(Slow(256, 0.0) for _ in range(8)))
        ema.torch.stream(model, client)
        with pytest.raises(ema.torch.Streamed, match="stay"):
            model.half()
        model[0].inner.weight = nn.Parameter(torch.zeros(256, 256))
        streamed = model.__dict__["_ema_streamed"]
        with pytest.raises(ema.torch.Streamed, match="was replaced"):
            streamed.cut(0.5)
        ema.torch.unstream(model)
