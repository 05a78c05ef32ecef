"""Which weights are streamed, what stands in their place, and what cannot be done to them."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
import ema.torch
from ema.torch.memory import device_of
from models.streaming import batch, same, stack, state, width_of
from nodes import until


class Tied(nn.Module):
    """An embedding used again at the end, one matrix in two layers, one twice in a layer, one alone."""

    def __init__(self, client: ema.Pool) -> None:
        super().__init__()
        torch.manual_seed(6)
        width = width_of(client)
        self.embedding = nn.Embedding(width, width)
        self.layers = nn.ModuleList(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))) for _ in range(5))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[3][0].weight = self.layers[1][0].weight
        self.layers[2][1].weight = self.layers[2][2].weight
        self.to(device_of(client)).requires_grad_(False)
        # The same bytes, another object: only now, since moving makes them two.
        self.layers[4][0].weight = nn.Parameter(self.layers[4][1].weight.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.fixture
def streamed(client: ema.Pool) -> Iterator[nn.Module]:
    model = stack(client)
    ema.torch.stream(model, client, resident=0.0)
    yield model
    with suppress(ema.BadInput):  # it is not streamed any more
        ema.torch.unstream(model)


@torch.no_grad()
def test_tied_weights(client: ema.Pool) -> None:
    model = Tied(client)
    layers = [part for layer in model.layers for part in layer]
    x = torch.arange(8, device=device_of(client))
    wanted, before, names = model(x), state(model), [n for n, _ in model.named_parameters()]
    ema.torch.stream(model, client, resident=0.0, layers=model.layers)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    assert [n for n, _ in model.named_parameters()] == names
    assert model.head.weight is model.embedding.weight
    assert model.layers[3][0].weight is model.layers[1][0].weight
    assert model.layers[2][1].weight is model.layers[2][2].weight
    assert type(model.layers[1][0].weight) is type(model.layers[4][0].weight) is nn.Parameter  # these stay
    ema.torch.unstream(model)
    same(model.state_dict(), before)
    assert model.layers[2][1].weight is model.layers[2][2].weight
    assert [part for layer in model.layers for part in layer] == layers


@torch.no_grad()
def test_kinds_of_weights(client: ema.Pool) -> None:
    class Mixed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.narrow = nn.Linear(width, width, dtype=torch.bfloat16)
            self.turned = nn.Parameter(torch.randn(width, width).t())
            self.scalar = nn.Parameter(torch.tensor(3.0))
            self.empty = nn.Parameter(torch.empty(0))
            self.wide = nn.Parameter(torch.randn(1, width).expand(width, width))
            self.whole = nn.Parameter(torch.arange(width), requires_grad=False)
            self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
            self.register_parameter("nothing", None)
            self.cell = nn.LSTM(width, width, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.narrow(x.to(torch.bfloat16)).float() @ self.turned * self.scalar
            y = y + x @ self.wide + self.whole
            return torch.tanh(self.cell(y)[0]).where(self.mask, 0.0)

    torch.manual_seed(7)
    model = nn.Sequential(*(Mixed(width_of(client)) for _ in range(4))).to(device_of(client))
    x, before = batch(client), state(model)
    strides = {n: p.stride() for n, p in model.named_parameters()}
    wanted = model(x)
    ema.torch.stream(model, client, resident=0.0)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    same(model.state_dict(), before)
    assert {n: p.stride() for n, p in model.named_parameters()} == strides
    assert all(type(b) is torch.Tensor for b in model.buffers())
    ema.torch.unstream(model)
    same(model.state_dict(), before)
    assert {n: p.stride() for n, p in model.named_parameters()} == strides
    assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_a_handle_reads_as_its_weight(client: ema.Pool) -> None:
    local, model = stack(client), stack(client)
    ema.torch.stream(model, client, resident=0.0)
    weight, real = model[4].weight, local[4].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device) == (real.shape, real.dtype, real.device)
    assert torch.equal(weight, real)
    assert bool((weight == real).all())
    assert torch.equal(weight.cpu(), real.cpu())
    assert torch.equal(weight[1:3], real[1:3])
    assert torch.equal(weight + 1, real + 1)
    assert torch.equal(weight.data, real)
    assert torch.equal(weight.to(torch.float64), real.to(torch.float64))
    assert weight[0, :3].tolist() == real[0, :3].tolist()
    assert weight.tolist() == real.tolist()
    assert torch.equal(copy.deepcopy(weight), real)
    assert torch.equal(pickle.loads(pickle.dumps(weight)), real)  # noqa: S301
    assert torch.equal(nn.functional.linear(real, weight), nn.functional.linear(real, real))
    if real.device.type == "cpu":
        assert (weight.numpy() == real.numpy()).all()
    assert "4.weight" in repr(weight)
    ema.torch.unstream(model)
    assert torch.equal(weight, real)  # one that was kept


@torch.no_grad()
def test_use_in_place_is_refused(streamed: nn.Sequential) -> None:
    before = state(streamed)
    weight = streamed[4].weight
    uses: list[Callable[[], object]] = [
        weight.zero_,
        lambda: weight.copy_(torch.zeros_like(weight)),
        lambda: weight.__iadd__(1),
        lambda: weight.__setitem__(0, 1.0),
        lambda: torch.add(weight, 1, out=weight),
        lambda: nn.init.normal_(weight),
        lambda: setattr(weight, "data", torch.zeros(1)),
        weight.data_ptr,
        weight.untyped_storage,
        weight[0].zero_,
        weight.view(-1).zero_,
        weight.data.zero_,
        lambda: torch._foreach_add_([weight], 1.0),
    ]
    for use in uses:
        with pytest.raises(ema.torch.Streamed, match=r"4\.weight is streamed: .*unstream"):
            use()
    with pytest.raises(RuntimeError, match="streamed"):
        streamed.load_state_dict(before)
    same(streamed.state_dict(), before)
    ema.torch.unstream(streamed)


def test_gradients_are_refused(streamed: nn.Sequential, client: ema.Pool) -> None:
    x = batch(client)
    with pytest.raises(ema.torch.Streamed, match="inference only"):
        streamed(x)
    with torch.inference_mode():
        streamed(x)
    ema.torch.unstream(streamed)
    streamed(x)


@torch.no_grad()
def test_moves_and_casts(streamed: nn.Sequential, client: ema.Pool) -> None:
    x = batch(client)
    wanted, before = streamed(x), state(streamed)
    for change in (
        nn.Module.half,
        lambda m: m.to("meta"),
        nn.Module.double,
        lambda m: m.to(torch.bfloat16),
        lambda m: m[4].half(),
    ):
        with pytest.raises(ema.torch.Streamed, match="streamed weights stay"):
            change(streamed)
    streamed.to(device_of(client)).float().eval().train().requires_grad_(False)  # nothing to do
    streamed[4].to(torch.float32)
    same(streamed.state_dict(), before)
    assert torch.equal(streamed(x), wanted)
    ema.torch.unstream(streamed)
    streamed.half().float()


@torch.no_grad()
def test_copies_and_pickles_are_refused(streamed: nn.Sequential) -> None:
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        for what in (streamed, streamed[4]):
            with pytest.raises(ema.torch.Streamed, match="copied or pickled"):
                make(what)
    ema.torch.unstream(streamed)
    same(copy.deepcopy(streamed).state_dict(), streamed.state_dict())


@torch.no_grad()
def test_a_weight_that_was_replaced(streamed: nn.Sequential, client: ema.Pool) -> None:
    x = batch(client)
    handle = streamed[4].weight
    streamed[4].weight = nn.Parameter(torch.zeros_like(handle))
    with pytest.raises(ema.torch.Streamed, match="weight of 4 was replaced"):
        streamed(x)
    streamed[4].weight = handle
    streamed(x)
    ema.torch.unstream(streamed)


@torch.no_grad()
def test_a_forward_that_was_wrapped(streamed: nn.Sequential, client: ema.Pool) -> None:
    x = batch(client)
    wanted = streamed(x)
    ours = streamed[4].forward
    streamed[4].forward = partial(ours)
    assert torch.equal(streamed(x), wanted)
    with pytest.raises(ema.torch.Streamed, match="was replaced while it was streamed"):
        ema.torch.unstream(streamed)
    streamed[4].forward = ours
    ema.torch.unstream(streamed)
    assert "forward" not in streamed[4].__dict__
    assert torch.equal(streamed(x), wanted)


@torch.no_grad()
def test_compiled_around_or_inside(streamed: nn.Sequential, client: ema.Pool) -> None:
    x = batch(client)
    wanted = streamed(x)
    compiled = torch.compile(streamed, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), wanted)
    ema.torch.unstream(streamed)


@pytest.mark.parametrize("requires_grad", [False, True])
@torch.no_grad()
def test_made_and_used_in_inference_mode(client: ema.Pool, requires_grad: bool) -> None:
    with torch.inference_mode():
        model = stack(client).requires_grad_(requires_grad)
        x, before = batch(client), state(model)
        wanted = model(x)
        ema.torch.stream(model, client, resident=0.0)
        assert torch.equal(model(x), wanted)
        same(model.state_dict(), before)
        ema.torch.unstream(model)
        assert torch.equal(model(x), wanted)


def test_what_cannot_be(client: ema.Pool) -> None:
    model = stack(client)
    for resident in (-0.1, 1.1, float("nan"), True, "half", None):
        with pytest.raises(ema.BadInput, match="resident"):
            ema.torch.stream(model, client, resident=resident)  # type: ignore[arg-type]
    for slots in (0, 33, "4"):
        with pytest.raises(ema.BadInput, match="slots"):
            ema.torch.stream(model, client, resident=0.0, slots=slots)  # type: ignore[arg-type]
    with pytest.raises(ema.BadInput, match="layers is Linear"):
        ema.torch.stream(model, client, resident=0.0, layers=[nn.Linear(1, 1)])
    with pytest.raises(ema.BadInput, match="twice"):
        ema.torch.stream(model, client, resident=0.0, layers=[model[0], model[0]])
    with pytest.raises(ema.BadInput, match="inside"):
        ema.torch.stream(model, client, resident=0.0, layers=[model, model[0]])
    with pytest.raises(ema.BadInput, match="with no parameters"):
        ema.torch.stream(nn.Sequential(nn.GELU()), client, resident=0.0)
    with pytest.raises(ema.BadInput, match="with meta"):
        ema.torch.stream(stack(client).to("meta"), client, resident=0.0)
    with pytest.raises(ema.BadInput, match="not streamed"):
        ema.torch.unstream(model)
    ema.torch.stream(model, client, resident=0.0)
    with pytest.raises(ema.InUse, match="streamed already"):
        ema.torch.stream(model, client, resident=0.5)
    with pytest.raises(ema.InUse, match="streamed already"):
        ema.torch.stream(nn.Sequential(model), client, resident=0.5)
    ema.torch.unstream(model)


@torch.no_grad()
def test_forgotten_models_give_everything_back(client: ema.Pool) -> None:
    driver, gpu = client.driver, client.gpu
    gc.collect()
    free = driver.memory()[gpu].free
    model = stack(client)
    ema.torch.stream(model, client, resident=0.0)
    model(batch(client))
    handle = model[0].weight
    del model
    gc.collect()
    if device_of(client).type == "cpu":
        until(lambda: driver.memory()[gpu].free == free, saying="the agent has let go too")
    with pytest.raises(ema.torch.Streamed, match="is gone"):
        handle.clone()


@torch.no_grad()
def test_two_models_at_once(client: ema.Pool) -> None:
    models = [stack(client), stack(client, depth=6, dtype=torch.float64)]
    inputs = [batch(client), batch(client, torch.float64)]
    wanted = [m(x) for m, x in zip(models, inputs, strict=True)]
    for model in models:
        ema.torch.stream(model, client, resident=0.0)
    for _ in range(3):
        for model, x, y in zip(models, inputs, wanted, strict=True):
            assert torch.equal(model(x), y)
    for model in models:
        ema.torch.unstream(model)
