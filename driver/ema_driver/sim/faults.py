"""Faults that the simulated devices can be given, at start (`SimConfig.faults`) or at run time (`SimDriver.inject`).

`gpu`, `source` and `target` are GPU numbers in the order of the configuration, whatever the enumeration order is today;
`-1` as a source or target means host memory.
"""

from typing import Annotated, Literal

import msgspec

GpuNumber = Annotated[int, msgspec.Meta(ge=0, le=1023)]
PlaceNumber = Annotated[int, msgspec.Meta(ge=-1, le=1023)]


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of all faults."""


class LostGpu(_Fault, tag="lost", frozen=True):
    """The GPU falls off the bus: its bytes are gone for good. Cleared: it is back, empty."""

    gpu: GpuNumber


class RemovedGpu(_Fault, tag="removed", frozen=True):
    """Like `LostGpu`, without any event, and the GPU is enumerated no more."""

    gpu: GpuNumber


class Xid(_Fault, tag="xid", frozen=True):
    """An XID event; memory and copies go on. Cleared: a recovered event."""

    gpu: GpuNumber
    code: Annotated[int, msgspec.Meta(ge=1, le=999)]


class LyingPair(_Fault, tag="lying-pair", frozen=True):
    """The pair claims a path and drops, or corrupts, what is written over it."""

    source: PlaceNumber
    target: PlaceNumber
    how: Literal["drop", "corrupt"] = "drop"


class SlowLink(_Fault, tag="slow-link", frozen=True):
    """Copies from source to target take `factor` times as long (nothing where link delays are off)."""

    source: PlaceNumber
    target: PlaceNumber
    factor: Annotated[float, msgspec.Meta(gt=1, le=1e6)]


class HungLink(_Fault, tag="hung-link", frozen=True):
    """Copies from source to target do not end until the fault is cleared."""

    source: PlaceNumber
    target: PlaceNumber


class HungQueries(_Fault, tag="hung-queries", frozen=True):
    """Memory queries that include the GPU do not return until the fault is cleared."""

    gpu: GpuNumber


class RefusedMemory(_Fault, tag="refused-memory", frozen=True):
    """The next `creates` calls that create at the place fail for want of memory (0: all, until cleared)."""

    place: PlaceNumber
    creates: Annotated[int, msgspec.Meta(ge=0)] = 0


class RefusedMapping(_Fault, tag="refused-mapping", frozen=True):
    """Memory at the place exists and cannot be mapped: the next `maps` calls fail (0: all, until cleared).

    `after` so many calls that still succeed.
    """

    place: PlaceNumber
    maps: Annotated[int, msgspec.Meta(ge=0)] = 0
    after: Annotated[int, msgspec.Meta(ge=0)] = 0


class UnsupportedMemory(_Fault, tag="unsupported-memory", frozen=True):
    """The GPU does not support the memory query."""

    gpu: GpuNumber


class NonsenseMemory(_Fault, tag="nonsense-memory", frozen=True):
    """The GPU's memory query answers all ones, as a record of the wrong size does."""

    gpu: GpuNumber


class StuckMemory(_Fault, tag="stuck-memory", frozen=True):
    """What is given up at the place stays taken until the fault is cleared, as after some crashes of a process."""

    place: PlaceNumber


Fault = (
    LostGpu
    | RemovedGpu
    | Xid
    | LyingPair
    | SlowLink
    | HungLink
    | HungQueries
    | RefusedMemory
    | RefusedMapping
    | UnsupportedMemory
    | NonsenseMemory
    | StuckMemory
)


def numbers(fault: Fault) -> tuple[int, ...]:
    """The GPU and place numbers that a fault names."""
    return tuple(getattr(fault, name) for name in ("gpu", "source", "target", "place") if hasattr(fault, name))
