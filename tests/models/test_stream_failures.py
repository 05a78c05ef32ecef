"""What is not to be had changes nothing; what is interrupted can be gone on with; what is lost is said before use."""

import ctypes
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
import ema.torch
from ema.torch.cut import Cut
from ema.torch.poison import Poison
from ema.torch.watch import Watch
from ema_core import wire
from ema_driver.protocol import Words
from ema_driver.sim import SimDriver
from ema_driver.sim.faults import LostGpu
from models.interrupts import interrupt, lines_of
from models.streaming import batch, same, stack, state
from nodes import Node, node, pool, sim, until
from up import Up


def untouched(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Not only equal: the very same, in the very same memory."""
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.numel() for p in model.parameters())
    assert all(not {"forward", "_apply", "_ema_streamed"} & m.__dict__.keys() for m in model.modules())
    with pytest.raises(ema.BadInput):
        ema.torch.report(model)


@torch.no_grad()
def test_a_full_pool_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki", borrowing={"maxPerPod": "128Ki"})) as it:
        model = stack(client := it.connect(0), depth=12)
        parameters, pointers = [*model.parameters()], [p.data_ptr() for p in model.parameters()]
        with pytest.raises((ema.PoolFull, ema.LimitReached)):
            ema.torch.stream(model, client, resident=0.0, timeout=0.1)
        untouched(model, parameters)
        assert [p.data_ptr() for p in model.parameters()] == pointers
        ema.torch.stream(model, client, resident=0.7)
        ema.torch.unstream(model)


@torch.no_grad()
def test_too_little_memory_in_the_middle(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(client)
    x, before, parameters = batch(client), state(model), [*model.parameters()]
    wanted, push = model(x), Cut.push

    def fails(cut: Cut, layer: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        if layer == 5:
            raise ema.OutOfMemory("no more")
        return push(cut, layer, fill)

    monkeypatch.setattr(Cut, "push", fails)
    with pytest.raises(ema.OutOfMemory):
        ema.torch.stream(model, client, resident=0.0)
    untouched(model, parameters)
    same(model.state_dict(), before)
    assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_too_little_memory_for_another_cut(client: ema.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    if client.granularity > 4096:
        pytest.skip("its layers have no local part on this GPU")
    model = stack(client)
    x, before = batch(client), state(model)
    wanted, push = model(x), Cut.push
    ema.torch.stream(model, client, resident=0.3)
    streamed, remote = model.__dict__["_ema_streamed"], ema.torch.report(model).remote_bytes
    first = streamed.cuts[0]
    for fails in (0, 5):

        def pushes(cut: Cut, layer: int, fill: Callable[[torch.Tensor], None], fails: int = fails) -> torch.Tensor:
            if cut is not first and layer == fails:
                raise ema.OutOfMemory("no more")
            return push(cut, layer, fill)

        monkeypatch.setattr(Cut, "push", pushes)
        with pytest.raises(ema.OutOfMemory):
            streamed.cut(0.7)
        assert streamed.cuts == [first]
        assert ema.torch.report(model).remote_bytes == remote
        assert torch.equal(model(x), wanted)
        same(model.state_dict(), before)
        monkeypatch.setattr(Cut, "push", push)
    streamed.cut(0.7)
    assert 0 < ema.torch.report(model).remote_bytes < remote
    assert torch.equal(model(x), wanted)
    ema.torch.unstream(model)
    same(model.state_dict(), before)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # just made when interrupted: collected later
@pytest.mark.parametrize("what", ["stream", "forward", "unstream", "cut", "read"])
@torch.no_grad()
def test_interrupted_anywhere(client: ema.Pool, what: str) -> None:
    if client.granularity > 4096:
        pytest.skip("where the CPU waits is where it can be interrupted")
    dice = random.Random(what)
    local, model = stack(client, depth=6), stack(client, depth=6)
    x, before = batch(client), state(local)
    wanted = local(x)

    def streamed() -> bool:
        return "_ema_streamed" in model.__dict__

    def prepare() -> None:
        if (what == "stream") == streamed():
            change = ema.torch.unstream if streamed() else lambda m: ema.torch.stream(m, client, resident=0.3)
            change(model)

    actions: dict[str, Callable[[], object]] = {
        "stream": lambda: ema.torch.stream(model, client, resident=0.3),
        "forward": lambda: model(x),
        "unstream": lambda: ema.torch.unstream(model),
        "read": lambda: torch.clone(model[2].weight),
        "cut": lambda: model.__dict__["_ema_streamed"].cut(dice.choice((0.0, 0.6))),
    }
    prepare()
    most = lines_of(actions[what])
    for after in sorted(dice.randrange(1, most) for _ in range(25)):
        prepare()
        with interrupt(after), suppress(KeyboardInterrupt):
            actions[what]()
        for _ in range(2):
            assert torch.equal(model(x), wanted), after
        same(model.state_dict(), before)
        assert torch.equal(model(x), wanted), after
    if streamed():
        ema.torch.unstream(model)
    same(model.state_dict(), before)
    gc.collect()  # tracebacks keep tensors, and these memory


def refused(model: nn.Module, x: torch.Tensor, *errors: type[ema.EmaError]) -> None:
    with pytest.raises(errors):
        model(x)
    with pytest.raises(errors):
        next(model.parameters()).clone()
    with pytest.raises(errors):
        ema.torch.unstream(model)


@torch.no_grad()
def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        model = stack(client)
        x = batch(client)
        wanted = model(x)
        ema.torch.stream(model, client, resident=0.5)
        assert torch.equal(model(x), wanted)
        agent.kill()
        refused(model, x, ema.AgentLost)
        agent.start()
        until(lambda: client.session == 2, within=30, saying="connected to the new agent")
        refused(model, x, ema.AgentLost)
        again = stack(client)
        ema.torch.stream(again, client, resident=0.5)
        assert torch.equal(again(x), wanted)
        ema.torch.unstream(again)


@pytest.fixture
def streams(forget_kinds: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  (ends last)
    """Slots are handed over as on a real GPU: by a stream that waits for words, and cannot raise."""

    def wait_on(_: SimDriver, _stream: int, page: Words, index: int, value: int) -> None:
        while not page.wait(index, value, 1.0):
            pass

    def write_on(_: SimDriver, _stream: int, page: Words, index: int, value: int) -> None:
        page.store(index, value)

    def word_at(_: ema.Pool, page: Words, index: int) -> torch.Tensor:
        address = getattr(page, "_base") + 4 * index  # noqa: B009 - of this driver
        return torch.frombuffer(ctypes.c_int32.from_address(address), dtype=torch.int32)

    monkeypatch.setattr(SimDriver, "wait_on", wait_on, raising=False)
    monkeypatch.setattr(SimDriver, "write_on", write_on, raising=False)
    monkeypatch.setattr("ema.torch.handover._stream", lambda _: 0)
    monkeypatch.setattr("ema.torch.cut.word_at", word_at)


@pytest.mark.usefixtures("streams")
@torch.no_grad()
def test_streams_that_wait_for_a_killed_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Up(tmp_path) as agent, ema.connect(agent.socket, gpu=0) as client:
        model = stack(client)
        x = batch(client)
        wanted = model(x)
        ema.torch.stream(model, client, resident=0.0)
        for _ in range(3):
            assert torch.equal(model(x), wanted)
        feed = model.__dict__["_ema_streamed"].cuts[0].feed

        def kill(*_: object) -> None:
            agent.kill()

        with monkeypatch.context() as patch:
            # As if the host were ahead of the GPU: it looked at everything before the agent went.
            patch.setattr(feed, "_check", lambda: None)
            patch.setattr(feed, "_ahead", 0)  # nor has it a run to start later
            hook = model[1].register_forward_hook(kill)
            found = model(x)
            hook.remove()
        assert bool(found.isnan().all())
        refused(model, x, ema.AgentLost)
        del model, feed
        gc.collect()


@pytest.mark.slow
@torch.no_grad()
def test_a_lost_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = sim(link_delays=False, granularity=4096)
    with node(tmp_path_factory.mktemp("n"), config, pool(chunk="64Ki")) as it:
        lose_a_gpu(it)
        gc.collect()
        # The agent first gives up on a chunk that it was moving away from the lost GPU.
        it.until(lambda a: len(a.sessions) < 2, within=30, saying="the session of the weights has ended")


def lose_a_gpu(it: Node) -> None:
    client = it.connect(0)
    it.never_clean()
    model = stack(client)
    x = batch(client)
    ema.torch.stream(model, client, resident=0.0)
    model(x)
    places = it.on_loop(lambda: {c.place for c in it.agent.ledger.chunks()})
    fault = LostGpu(gpu=[str(g) for g in it.gpus].index(min(map(str, places))))
    it.observer.inject(fault)
    try:

        def lost() -> bool:
            try:
                model(x)
            except (ema.DataLost, ema.AgentLost):  # a copy that meets the loss ends the session
                return True
            return False

        until(lost, saying="the loss is told")
        refused(model, x, ema.DataLost, ema.AgentLost)
    finally:
        it.observer.clear(fault)


def test_outputs_of_lost_weights_are_nan() -> None:
    over, spoilt = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    poison = Poison(over, spoilt)
    wide = torch.randn(1, 3).expand(4, 3)
    with torch.inference_mode():
        made = torch.randn(3)
    output = {"a": (torch.tensor([1.0, -0.0]), wide), "b": [made, torch.randn(2).bfloat16(), torch.arange(3)], "c": "x"}
    flat = [t.clone() for t in (*output["a"], *output["b"])]
    poison(output)
    for kept, found in zip(flat, (*output["a"], *output["b"]), strict=True):
        assert torch.equal(kept.view(torch.uint8), found.contiguous().view(torch.uint8))
    for word in (over, spoilt):
        word.fill_(1)
        again = [t.clone() for t in flat]
        poison(again)
        assert all(t.isnan().all() for t in again[:4])
        assert torch.equal(again[4], flat[4])
        word.fill_(0)
    over.fill_(1)
    poison(output)
    assert all(t.isnan().all() for t in (*output["a"], *output["b"][:2]))


def test_who_waits_for_a_lost_agent_is_let_pass(client: ema.Pool) -> None:
    window, spoilt = client.window(2, client.granularity), client.driver.words(1)
    slots = window.slots
    lost: list[ema.EmaError] = []
    passed: list[int] = []

    def check() -> None:
        if lost:
            raise lost[0]

    watch = Watch(check, slots, spoilt, lambda: len(passed) > 5)
    assert not slots[0].flag[0].wait(slots[0].flag[1], wire.FULL, 0.2)
    lost.append(ema.AgentLost("gone"))
    page, word = slots[1].flag
    for number in range(7):
        assert page.wait(word, wire.FULL, 5.0)
        assert spoilt.load(0) == 1
        passed.append(number)
        page.store(word, wire.EMPTY)
    watch.close()
    spoilt.close()
    window.close()
