"""The layers of a model: which modules run in order, and which of their weights can be streamed.

Weights that a layer shares with anything outside it (tied embeddings, one matrix in several layers) stay local: they
are there once, and many read them. So do buffers, weights of other devices, and those of modules that keep references
to their weights beside `_parameters`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from ema import errors

ALIGN: Final = 512
"""Bytes: as torch's own allocator does, so that kernels are chosen as for the model before."""
_WORTH: Final = 0.1
"""Part of the model's bytes from which on a list of modules counts as its layers."""


@dataclass(slots=True, eq=False)
class Weight:
    """One parameter of a layer, under all the names that the layer has for it."""

    parameter: nn.Parameter
    at: int
    """Offset in the layer's range, in bytes."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)

    inference: bool = False
    """Whether the parameter was made in inference mode: then it stays so."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def leave(self) -> None:
        """Give the parameter's own memory up."""
        with torch.inference_mode(self.inference):
            self.parameter.data = torch.empty(0, dtype=self.dtype, device=self.parameter.device)

    def come_back(self, memory: torch.Tensor) -> None:
        """Give the parameter memory of its own, with the bytes that a layer's range holds. Raises OutOfMemory."""
        with torch.inference_mode(self.inference):
            try:
                data = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.parameter.device)
            except torch.OutOfMemoryError as error:
                raise errors.OutOfMemory(f"no room to bring {self.nbytes} bytes back: {error}") from error
            self.parameter.data = data.copy_(self.within(memory))

    def set_requires_grad(self, wanted: bool) -> None:
        """As somebody may have set it of what stood in for the parameter."""
        if self.parameter.requires_grad != wanted:
            with torch.inference_mode(self.inference):
                self.parameter.requires_grad_(wanted)

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """This weight in a layer's range (uint8)."""
        part = memory[self.at : self.at + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride)


@dataclass(slots=True, eq=False)
class Layer:
    """A module that runs as a whole, and those of its weights that can be streamed."""

    name: str
    module: nn.Module
    weights: list[Weight]

    @property
    def size(self) -> int:
        """Bytes of its range."""
        return max((w.at + w.nbytes for w in self.weights), default=0)


def find(model: nn.Module, device: torch.device, chosen: Sequence[nn.Module] | None = None) -> list[Layer]:
    """The layers of a model, in the order of their registration. Raises BadInput where there are none."""
    names = {id(m): name for name, m in model.named_modules()}
    modules = list(chosen) if chosen is not None else _guess(model)
    for module in modules:
        if id(module) not in names:
            raise errors.BadInput("layers", type(module).__name__, f"modules of this {type(model).__name__}")
    _check_apart(modules, names)
    shared = _shared(model, modules)
    layers = [Layer(names[id(m)], m, _weights(m, device, shared)) for m in modules]
    layers = [layer for layer in layers if layer.weights]
    if not layers:
        found = sorted({str(p.device) for p in model.parameters()}) or ["no parameters"]
        expected = f"a model with layers whose weights are on {device}, dense and used by one layer each"
        raise errors.BadInput("model", f"a {type(model).__name__} with {', '.join(found)}", expected)
    return layers


def _guess(model: nn.Module) -> list[nn.Module]:
    """The lists with most of the bytes; without such a list, the children."""
    total = _bytes(model)
    lists = [(_bytes(m), m) for m in _lists(model)]
    most = max((n for n, _ in lists), default=0)
    if most > _WORTH * total:
        return _unique(part for n, m in lists if n > _WORTH * most for part in _parts(m))
    while len(heavy := [c for c in model.children() if _bytes(c)]) == 1 and any(map(_bytes, heavy[0].children())):
        model = heavy[0]
    return _unique(part for child in model.children() for part in _parts(child))


def _lists(module: nn.Module) -> Iterator[nn.Module]:
    """Lists that are in no other list."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _lists(child)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """What runs as a whole: containers only hold."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        for child in module.children():
            yield from _parts(child)
    else:
        yield module


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(m): m for m in modules}.values())


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _check_apart(modules: Sequence[nn.Module], names: dict[int, str]) -> None:
    """No layer may be inside another: their slots would be needed at once."""
    chosen = {id(m) for m in modules}
    if len(chosen) < len(modules):
        raise errors.BadInput("layers", "a module named twice", "each module once")
    for outer in modules:
        for inner in outer.modules():
            if inner is not outer and id(inner) in chosen:
                where = f"{names[id(inner)]} inside {names[id(outer)]}"
                raise errors.BadInput("layers", where, "modules that are not inside one another")


def _shared(model: nn.Module, modules: Sequence[nn.Module]) -> set[int]:
    """Ids of parameters whose bytes more than one layer, or something outside the layers, also uses."""
    layer_of: dict[int, int] = {}
    for layer in modules:
        for module in layer.modules():
            layer_of[id(module)] = id(layer) if layer_of.get(id(module), id(layer)) == id(layer) else 0
    users: dict[int, set[int]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:  # noqa: SLF001
            if tensor is not None:
                tensors[id(tensor)] = tensor
                users.setdefault(id(tensor), set()).add(layer_of.get(id(module), 0))
    return {number for number, by in users.items() if by == {0} or len(by) > 1} | _overlapping(tensors)


def _overlapping(tensors: dict[int, torch.Tensor]) -> set[int]:
    """Ids of those that share bytes with another."""
    spans = []
    for number, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel():
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            first = tensor.data_ptr()
            spans.append((first, first + reach * tensor.element_size(), number))
    found: set[int] = set()
    end, last = 0, 0
    for first, until, number in sorted(spans):
        if first < end:
            found |= {number, last}
        if until > end:
            end, last = until, number
    return found


def _weights(layer: nn.Module, device: torch.device, shared: set[int]) -> list[Weight]:
    found: dict[int, Weight] = {}
    at = 0
    for module in layer.modules():
        if isinstance(module, nn.RNNBase):  # keeps a list of its weights beside `_parameters`
            continue
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is None or id(parameter) in shared or not _streamable(parameter, device):
                continue
            weight = found.get(id(parameter))
            if weight is None:
                at = -(-at // ALIGN) * ALIGN
                weight = Weight(parameter, at, tuple(parameter.shape), parameter.stride(), parameter.dtype)
                weight.inference = parameter.is_inference()
                found[id(parameter)] = weight
                at += weight.nbytes
            weight.sites.append((module, name))
    return list(found.values())


def _streamable(parameter: nn.Parameter, device: torch.device) -> bool:
    """Whether it is a plain dense tensor of that device. Subclasses keep more than their bytes."""
    return (
        type(parameter) is nn.Parameter
        and type(parameter.data) is torch.Tensor
        and parameter.device == device
        and parameter.layout is torch.strided
        and parameter.numel() > 0
        and torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    )
