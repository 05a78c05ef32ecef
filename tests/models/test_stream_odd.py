"""Forwards that do not go straight: skipped and repeated layers, another order, errors and interrupts in the middle."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
import ema.torch
from ema.torch.memory import device_of
from models.streaming import batch, same, stack, state, width_of


class Odd(nn.Module):
    """Runs its layers as `path` says; a negative number raises before that layer's end."""

    def __init__(self, client: ema.Pool, depth: int = 9) -> None:
        super().__init__()
        torch.manual_seed(4)
        width = width_of(client)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.path = list(range(depth))
        self.to(device_of(client)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            x = self.layers[number](x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))
        self.then: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.then()
        return torch.tanh(y) * self.scale


@pytest.fixture
def odd(client: ema.Pool) -> Iterator[tuple[Odd, Odd, torch.Tensor]]:
    """A model, the same one streamed, and an input."""
    local, model = Odd(client), Odd(client)
    ema.torch.stream(model, client, resident=0.4 if client.granularity == 4096 else 0.0)
    with torch.no_grad():
        yield local, model, batch(client)
        same(model.state_dict(), state(local))
        ema.torch.unstream(model)
        same(model.state_dict(), state(local))


def run(models: tuple[Odd, Odd, torch.Tensor], path: list[int]) -> None:
    local, model, x = models
    local.path = model.path = path
    assert torch.equal(model(x), local(x))


PATHS = [
    [*range(9)],
    [8, 7, 6, 5, 4, 3, 2, 1, 0],
    [0, 2, 4, 6, 8],
    [3],
    [0, 0, 1, 1, 2, 2],
    [0, 1, 2, 0, 1, 2, 0, 1, 2],
    [5, 5, 5],
    [],
]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: "-".join(map(str, p)) or "none")
def test_any_path(odd: tuple[Odd, Odd, torch.Tensor], path: list[int]) -> None:
    for _ in range(3):
        run(odd, path)
    run(odd, [*range(9)])
    run(odd, path)


def test_the_first_step_teaches_the_order(odd: tuple[Odd, Odd, torch.Tensor]) -> None:
    _, model, _ = odd
    cut = model.__dict__["_ema_streamed"].cuts[0]
    for path in ([8, 7, 6, 5, 4, 3, 2, 1, 0], [*range(9)]):
        run(odd, path)
        run(odd, path)
        assert cut.layout.order == (8, 7, 6, 5, 4, 3, 2, 1, 0)
    run(odd, [*range(8, -1, -1)])
    before = cut.runs
    for _ in range(5):
        run(odd, [*range(8, -1, -1)])
    assert cut.runs - before == 5  # no fetch is for nothing


def test_random_paths_and_reads(odd: tuple[Odd, Odd, torch.Tensor]) -> None:
    dice = random.Random(5)
    local, model, _ = odd
    for _ in range(30):
        run(odd, dice.choices(range(9), k=dice.randrange(12)))
        if dice.random() < 0.4:
            number = dice.randrange(9)
            assert torch.equal(model.layers[number].inner.weight, local.layers[number].inner.weight)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_ends_in_the_middle(odd: tuple[Odd, Odd, torch.Tensor], error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    _, model, x = odd
    for number in (4, 0, 8):
        model.path = [*range(9)]
        model.layers[number].then = fail
        with pytest.raises(error):
            model(x)
        model.layers[number].then = lambda: None
        run(odd, [*range(9)])


def test_layers_of_two_threads_take_turns(odd: tuple[Odd, Odd, torch.Tensor]) -> None:
    local, model, x = odd
    wanted = local(x)
    found: list[torch.Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            found.extend(model(x) for _ in range(3))

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(torch.equal(y, wanted) for y in found)


def test_a_layer_inside_another_is_refused(odd: tuple[Odd, Odd, torch.Tensor]) -> None:
    _, model, x = odd
    model.path = [*range(9)]
    inner, outer = model.layers[6], model.layers[2]
    outer.then = lambda: inner(x)
    with pytest.raises(ema.torch.Streamed, match=r"layers\.6 is run inside layers\.2"):
        model(x)
    outer.then = inner.inner.weight.clone
    with pytest.raises(ema.torch.Streamed, match=r"weights are read inside layers\.2"):
        model(x)
    outer.then = lambda: None
    run(odd, [*range(9)])


def test_a_layer_may_read_its_own_weights(odd: tuple[Odd, Odd, torch.Tensor]) -> None:
    local, model, x = odd
    handle = model.layers[2].inner.weight
    seen: list[torch.Tensor] = []
    model.layers[2].then = lambda: seen.append(handle.clone())
    model(x)
    model.layers[2].then = lambda: None
    assert torch.equal(seen[0], local.layers[2].inner.weight)


@torch.no_grad()
def test_parts_that_never_run_as_a_whole(client: ema.Pool) -> None:
    class Reaches(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer.inner(x)) * layer.scale
            return x

    model = Reaches(client)
    x, before = batch(client), state(model)
    wanted = model(x)
    ema.torch.stream(model, client, resident=0.0)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    ema.torch.unstream(model)
    assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_one_layer_alone(client: ema.Pool) -> None:
    model = stack(client, depth=1)
    x = batch(client)
    wanted = model(x)
    ema.torch.stream(model, client, resident=0.0)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    ema.torch.unstream(model)
