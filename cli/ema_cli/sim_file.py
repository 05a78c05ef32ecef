"""sim.yaml: a simulated server as people write it, with quantities and durations, for `ema up --sim`."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml

from ema_core.api import Bytes, BytesPerSecond, Seconds
from ema_core.errors import InvalidInput
from ema_core.quantity import parse_duration, parse_quantity
from ema_core.reading import Parser, read
from ema_driver.sim.config import SimConfig
from ema_driver.sim.faults import Fault


class _File(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """What all parts of the file have in common: what is left out is left to `SimConfig`'s defaults."""


class GpuGroupFile(_File, frozen=True):
    """Equal GPUs."""

    count: int | None = None
    product: str | None = None
    memory: Bytes | None = None
    reserved: Bytes | None = None
    numa: int | None = None


class LinkFile(_File, frozen=True):
    """One ordered pair of places, by number, -1 for host memory."""

    source: int
    target: int
    kind: str
    rate: BytesPerSecond | None = None


class SimFile(_File, frozen=True):
    """The whole file. Fields are those of `SimConfig`, in camelCase."""

    gpus: tuple[GpuGroupFile, ...] | None = None
    host_memory: Bytes | None = None
    granularity: Bytes | None = None
    link: str | None = None
    links: tuple[LinkFile, ...] | None = None
    nvlink_rate: BytesPerSecond | None = None
    pcie_rate: BytesPerSecond | None = None
    local_rate: BytesPerSecond | None = None
    latency: Seconds | None = None
    link_delays: bool | None = None
    shuffle_enumeration: bool | None = None
    seed: int | None = None
    faults: tuple[Fault, ...] | None = None
    linger: Seconds | None = None


def _fault(value: object, field: str) -> Fault:
    try:
        return msgspec.convert(value, Fault)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise InvalidInput.of(field + path.rstrip("`"), value, f"a fault: {text}") from None


_PARSERS: Mapping[object, Parser] = {
    Bytes: parse_quantity,
    BytesPerSecond: parse_quantity,
    Seconds: parse_duration,
    Fault: _fault,
}


def load_sim(document: object) -> SimConfig:
    """A simulated server from a parsed YAML document; an empty one is the default. Raises InvalidInput."""
    written = read(SimFile, {} if document is None else document, path="", parsers=_PARSERS)
    try:
        return SimConfig.parse(_by_field_name(written))
    except ValueError as error:
        field, _, expected = str(error).partition(": ")
        raise InvalidInput.of(f"sim file, {field}", document, expected) from None


def read_sim(path: Path) -> SimConfig:
    """`load_sim` of a file. Raises InvalidInput, also when it cannot be read."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidInput.of("--sim", str(path), f"a readable file ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8, dates, numbers
        raise InvalidInput.of(str(path), str(error), "a YAML document") from error
    return load_sim(document)


def _by_field_name(part: msgspec.Struct) -> dict[str, object]:
    """What was written, under Python's names, as plain data."""
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    return {
        name: [_by_field_name(item) if isinstance(item, _File) else msgspec.to_builtins(item) for item in value]
        if isinstance(value, tuple)
        else value
        for name, value in fields.items()
        if value is not None
    }
