"""Models and GPUs by name, or by their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from ema_core.errors import FieldError, InvalidInput
from ema_core.quantity import parse_quantity

GI = 2**30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """A language model, as far as memory and time go."""

    name: str
    weights: int
    """Bytes."""
    kv_per_token: int
    """Bytes of keys and values: 2 * layers * kv_heads * head_dim * 2 in bf16."""
    params: int
    """Parameters; a token costs 2 * params floating point operations."""
    layers: int


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU, by the rates that programs reach (not by those of the data sheet)."""

    name: str
    memory: int
    """Bytes."""
    reserved: int
    """Bytes that the driver, contexts and a model's workspace take; never lendable."""
    compute: int
    """Floating point operations a second in bf16."""
    read: int
    """Bytes a second from the GPU's own memory."""
    nvlink: int
    """Bytes a second from a neighbour, one way; 0 where there is no NVLink."""
    pcie: int
    """Bytes a second from host memory, one way."""

    def link(self, kind: str) -> int:
        """Rate of `nvlink` or `pcie`. Raises InvalidInput for another kind, or one that this GPU lacks."""
        rate = {"nvlink": self.nvlink, "pcie": self.pcie}.get(kind, 0)
        if rate <= 0:
            raise InvalidInput.of("--link", kind, f"a link that {self.name} has: nvlink or pcie")
        return rate


def _llama(name: str, params: int, layers: int) -> Model:
    """Llama 3.1: 8 key-value heads of 128, two bytes an element."""
    return Model(name, weights=2 * params, kv_per_token=2 * layers * 8 * 128 * 2, params=params, layers=layers)


MODELS: Mapping[str, Model] = {
    "llama-3.1-8b": _llama("Llama-3.1-8B", 8_030_261_248, 32),
    "llama-3.1-70b": _llama("Llama-3.1-70B", 70_553_706_496, 80),
}

GPUS: Mapping[str, GpuSpec] = {
    # Compute, read and PCIe rates measured; NVLink from public measurements of 370 to 450 GB/s.
    "h200": GpuSpec("H200", 143_771 * 2**20, GI, 790 * 10**12, 41 * 10**11, 400 * 10**9, 55 * 10**9),
    # The data sheet's rates, times what the H200 reaches of its own: compute 0.80, memory 0.85, links 0.89.
    "a100-80g": GpuSpec("A100-80G", 80 * GI, GI, 250 * 10**12, 1_730 * 10**9, 267 * 10**9, 25 * 10**9),
}


def find_model(text: str) -> Model:
    """A preset, or `weights=16Gi,kv=128Ki,params=8G,layers=32`. Raises InvalidInput."""
    if "=" not in text:
        return _preset(MODELS, text, "--model", "weights=16Gi,kv=128Ki,params=8G,layers=32")
    numbers = _numbers(text, "--model", ("weights", "kv", "params", "layers"))
    return Model("custom", numbers["weights"], numbers["kv"], numbers["params"], numbers["layers"])


def find_gpu(text: str) -> GpuSpec:
    """A preset, or `memory=24Gi,reserved=1Gi,compute=100T,read=1T,nvlink=0,pcie=25G`. Raises InvalidInput."""
    example = "memory=24Gi,reserved=1Gi,compute=100T,read=1T,nvlink=0,pcie=25G"
    if "=" not in text:
        return _preset(GPUS, text, "--gpu", example)
    numbers = _numbers(text, "--gpu", ("memory", "reserved", "compute", "read", "nvlink", "pcie"), may_be_zero="nvlink")
    return GpuSpec("custom", *numbers.values())


def kv_share(model: Model, gpu: GpuSpec) -> int:
    """Bytes left on the GPU for keys and values. Raises InvalidInput, with the bytes, if the model does not fit."""
    left = gpu.memory - gpu.reserved - model.weights
    if left < model.kv_per_token:
        needed = model.weights + gpu.reserved + model.kv_per_token
        raise InvalidInput.of(
            "--model",
            model.name,
            f"a model that fits {gpu.name}: this one needs {needed} bytes ({needed / GI:.1f} GiB: weights "
            f"{model.weights}, reserved {gpu.reserved}, one token {model.kv_per_token}), the GPU has {gpu.memory} "
            f"({gpu.memory / GI:.1f} GiB)",
        )
    return left


def _preset(presets: Mapping[str, T], text: str, field: str, example: str) -> T:
    if text.lower() not in presets:
        raise InvalidInput.of(field, text, f"one of {', '.join(presets)}, or numbers such as {example}")
    return presets[text.lower()]


def _numbers(text: str, field: str, keys: tuple[str, ...], may_be_zero: str = "") -> dict[str, int]:
    given = dict(pair.partition("=")[::2] for pair in text.split(","))
    errors = [FieldError(f"{field} {key}", given[key], f"one of {', '.join(keys)}") for key in given if key not in keys]
    numbers: dict[str, int] = {}
    for key in keys:
        try:
            numbers[key] = parse_quantity(given.get(key), f"{field} {key}")
        except InvalidInput as refused:
            errors += refused.errors
            continue
        if numbers[key] == 0 and key != may_be_zero:
            errors.append(FieldError(f"{field} {key}", given[key], "more than 0"))
    if errors:
        raise InvalidInput(errors)
    return numbers
