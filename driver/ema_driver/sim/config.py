"""What is simulated: GPUs, memory, links, faults."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

import msgspec

from ema_driver.sim.faults import Fault, PlaceNumber, numbers

PAGE = 4096
"""Sizes can be no finer than a page of the machine underneath, in bytes."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**56)]
Rate = Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class GpuGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal GPUs."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    product: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "Simulated GPU"
    memory: Bytes = 1 << 30
    """Bytes of each."""
    reserved: Bytes = 0
    """Bytes of `memory` that the driver keeps for itself."""
    numa: int | None = None

    def __post_init__(self) -> None:
        if self.reserved >= self.memory:
            raise ValueError(f"reserved: {self.reserved} bytes of {self.memory}; must be less than memory")


class LinkOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One ordered pair of places (GPU numbers, -1 for host memory) that differs from the rest."""

    source: PlaceNumber
    target: PlaceNumber
    kind: Literal["nvlink", "pcie", "local", "none"]
    """`none`: no path is claimed, and a copy over it is a fault."""
    rate: Rate | None = None
    """Bytes per second; None: the rate of the kind."""


class SimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A simulated server. Amounts are bytes, rates bytes per second one way, times seconds."""

    gpus: tuple[GpuGroup, ...] = (GpuGroup(count=4),)
    host_memory: Bytes = 4 << 30
    granularity: Annotated[int, msgspec.Meta(ge=PAGE, multiple_of=PAGE, le=1 << 30)] = 2 << 20
    link: Literal["nvlink", "pcie"] = "nvlink"
    """Between GPUs. GPUs and host memory are always joined by `pcie`."""
    links: tuple[LinkOverride, ...] = ()
    nvlink_rate: Rate = 400_000_000_000
    pcie_rate: Rate = 55_400_000_000
    local_rate: Rate = 1_300_000_000_000
    latency: Annotated[float, msgspec.Meta(ge=0, le=1)] = 3e-6
    """Added to every copy; the lane is busy meanwhile."""
    link_delays: bool = True
    """False: copies take as long as this machine needs to move the bytes."""
    shuffle_enumeration: bool = False
    """A new order of enumeration at every start."""
    seed: int | None = None
    """Makes `shuffle_enumeration` give the same order each time."""
    faults: tuple[Fault, ...] = ()
    linger: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 3.0
    """How long the device process stays after its last session has ended."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise ValueError("gpus: empty; name at least one group of GPUs")
        count = self.gpu_count
        named: list[tuple[str, tuple[int, ...]]]
        named = [(f"links[{i}]", (link.source, link.target)) for i, link in enumerate(self.links)]
        named += [(f"faults[{i}]", numbers(fault)) for i, fault in enumerate(self.faults)]
        for field, used in named:
            for number in used:
                if number >= count:
                    raise ValueError(f"{field}: no GPU {number}; there are {count}, numbered from 0")

    @property
    def gpu_count(self) -> int:
        """How many GPUs there are in all."""
        return sum(group.count for group in self.gpus)

    @classmethod
    def parse(cls, data: Mapping[str, object]) -> Self:
        """From plain data. Raises ValueError that names the field, its value and what would be right."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            field = path.removesuffix("`").lstrip(".")
            raise ValueError(f"{field or 'sim'}: {_value(data, field)}{text}") from None


def _value(data: object, field: str) -> str:
    for key in re.findall(r"\w+", field):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list | tuple) and key.isdigit() and int(key) < len(data):
            data = data[int(key)]
        else:
            return ""
    return "" if isinstance(data, Mapping | list | tuple) else f"{data!r} is wrong: "
