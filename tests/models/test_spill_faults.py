"""What becomes of a training step whose agent or lender goes: a typed error before gradients are used, then local."""

import ctypes
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
from ema.torch import Spill, spill_activations
from ema.torch.spill_guard import Guard
from ema.torch.spill_rings import Rings
from ema_core import wire
from ema_driver.protocol import Words
from ema_driver.sim import SimDriver
from ema_driver.sim.faults import LostGpu
from nodes import MIB, node, pool, sim, until
from up import Up

torch.set_num_threads(1)
STREAM = 7


class Trained:
    """A small network and the gradients of its steps.

    `at` is called with the number of a layer before it runs, with -1 before backward and -2 in its middle.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU())])

    def step(self, spill: Spill, at: Callable[[int], None] | None = None) -> list[torch.Tensor]:
        self.model.zero_grad()
        with spill:
            hidden = middle = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
            for number, layer in enumerate(self.model):
                if at is not None:
                    at(number)
                hidden = layer(hidden)
                middle = hidden if number == len(self.model) // 2 else middle
            if at is not None:
                at(-1)
                middle.register_hook(partial(_then, at))
            hidden.square().mean().backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def _then(at: Callable[[int], None], _: torch.Tensor) -> None:
    at(-2)


def stored(spill: Spill) -> bool:
    """Whether everything that left has arrived."""
    rings = spill._rings
    return rings is not None and not any(slot.full for slot in rings._windows[0].slots)


@pytest.mark.parametrize(
    ("when", "in_place"),
    [(0, True), (5, True), (15, True), (-1, True), (-2, True), (-1, False), (-2, False)],
    ids=["before all", "early", "late", "turn", "in backward", "turn, copies", "in backward, copies"],
)
def test_an_agent_that_is_killed(tmp_path: Path, when: int, in_place: bool) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        trained = Trained()
        with closing(spill_activations(client, fraction=1.0, min_bytes=16 << 10, slots=2, in_place=in_place)) as spill:
            wanted = trained.step(spill)
            for _ in range(2):
                assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.spilled_bytes > 0

            def kill(number: int) -> None:
                if number == when:
                    agent.kill()
                    until(lambda: not client.alive)

            if when == 0:  # nothing has left yet
                assert all(map(torch.equal, trained.step(spill, kill), wanted))
            else:
                with pytest.raises(ema.AgentLost):
                    trained.step(spill, kill)
            assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.spilled_bytes == 0
            agent.start()
            until(lambda: client.alive, within=30, saying="connected to the new agent")
            for _ in range(2):
                assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.spilled_bytes > 0
            assert spill.report.learnt == 1


@pytest.fixture
def streams(forget_kinds: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  (ends last)
    """Slots are handed over as on a real GPU: by a stream that waits for words, and cannot raise."""

    def wait_on(_: SimDriver, stream: int, page: Words, index: int, value: int) -> None:
        assert stream == STREAM
        while not page.wait(index, value, 1.0):
            pass

    def write_on(_: SimDriver, stream: int, page: Words, index: int, value: int) -> None:
        assert stream == STREAM
        page.store(index, value)

    def words(guard: Guard) -> list[torch.Tensor]:
        places = (guard._page, guard._word), (guard._pool._notice, wire.NOTICE_OVER)
        addresses = [getattr(page, "_base") + 4 * index for page, index in places]  # noqa: B009 - of this driver
        return [torch.frombuffer(ctypes.c_int32.from_address(a), dtype=torch.int32)[0] for a in addresses]

    monkeypatch.setattr(SimDriver, "wait_on", wait_on, raising=False)
    monkeypatch.setattr(SimDriver, "write_on", write_on, raising=False)
    monkeypatch.setattr("ema.torch.handover._stream", lambda _: STREAM)
    monkeypatch.setattr(Guard, "words", words)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ahead", [True, False], ids=["the host is ahead", "the host sees it"])
def test_a_stream_whose_agent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool, ahead: bool
) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        trained = Trained()
        with closing(spill_activations(client, fraction=1.0, min_bytes=16 << 10, slots=2, in_place=in_place)) as spill:
            wanted = trained.step(spill)
            for _ in range(4):
                assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.spilled_bytes > 0

            def kill(number: int) -> None:
                if number == -2:
                    agent.kill()
                    until(lambda: not client.alive)

            if ahead:
                with monkeypatch.context() as patch:
                    patch.setattr(Rings, "lost", None)
                    found = trained.step(spill, kill)
                assert all(map(torch.equal, found[-6:], wanted[-6:])), "what came before"
                assert all(bool(g.isnan().any()) for g in found[:2]), "what came after"
                with pytest.raises(ema.AgentLost), spill:
                    raise AssertionError("nothing was run")
            else:
                with pytest.raises(ema.AgentLost):
                    trained.step(spill, kill)
            assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.spilled_bytes == 0


def test_a_lender_that_is_lost_with_the_only_copy(tmp_path: Path) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path, config, pool(chunk="64Ki")) as it:
        it.never_clean()
        client, trained = it.connect(0), Trained()
        with closing(spill_activations(client, fraction=1.0, min_bytes=16 << 10, slots=2, timeout=15.0)) as spill:
            wanted = trained.step(spill)
            for _ in range(2):
                assert all(map(torch.equal, trained.step(spill), wanted))
            places = it.on_loop(lambda: {c.place for c in it.agent.ledger.chunks()})
            fault = LostGpu(gpu=next(n for n, g in enumerate(it.gpus) if g in places))

            def lose(number: int) -> None:
                if number < 0:
                    until(lambda: stored(spill), saying="no copy is under way")
                    it.observer.inject(fault)
                    until(lambda: spill._connection is not None and spill._connection._lost, saying="it was told")

            with pytest.raises(ema.DataLost):
                trained.step(spill, lose)
            for _ in range(3):
                assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.spilled_bytes > 0, "there are other lenders"
        it.observer.clear(fault)


def test_lenders_that_want_their_memory_back(tmp_path: Path) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path, config, pool(chunk="64Ki")) as it:
        client, trained = it.connect(0), Trained()
        with closing(spill_activations(client, fraction=1.0, min_bytes=16 << 10, slots=2)) as spill:
            wanted = trained.step(spill)
            for _ in range(2):
                trained.step(spill)

            def take(number: int) -> None:
                if number == 10:
                    held = [h for gpu in (1, 2, 3) for h in it.take_all_but(gpu, 2 * MIB)]
                    until(lambda: not any(it.lent(gpu) for gpu in (1, 2, 3)), saying="all is in host memory")
                    it.outsider.release(held)

            for _ in range(2):
                assert all(map(torch.equal, trained.step(spill, take), wanted))
            assert spill.report.differing == 0


def test_a_slow_link_is_waited_for_or_spared(tmp_path: Path) -> None:
    config = sim(granularity=4096, nvlink_rate=20_000_000, pcie_rate=20_000_000)
    with node(tmp_path, config, pool(chunk="64Ki")) as it:
        client, trained = it.connect(0), Trained()
        with closing(spill_activations(client, fraction=1.0, min_bytes=16 << 10, slots=2)) as spill:
            wanted = trained.step(spill)
            for _ in range(3):
                assert all(map(torch.equal, trained.step(spill), wanted))
            everything = spill.report
        assert everything.exposed_wait > 0.5 * everything.spilled_bytes / 20e6
        with closing(spill_activations(client, min_bytes=16 << 10, slots=2)) as spill:
            for _ in range(4):
                assert all(map(torch.equal, trained.step(spill), wanted))
            assert spill.report.learnt == 1
            assert spill.report.spilled_bytes < everything.spilled_bytes / 2
