"""sim.yaml: what is simulated, written as people write amounts (`24Gi`, `400G`) and names (`hostMemory`)."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from ema_core.errors import InvalidInput
from ema_core.quantity import parse_duration, parse_quantity
from ema_driver.sim import SimConfig

_READ: Final[Mapping[str, Callable[[object, str], object]]] = {
    **dict.fromkeys(
        ("memory", "reserved", "hostMemory", "granularity", "rate", "nvlinkRate", "pcieRate", "localRate"),
        parse_quantity,
    ),
    **dict.fromkeys(("latency", "linger"), parse_duration),
}


def read_sim(documents: list[object]) -> SimConfig:
    """A simulated server from the documents of sim.yaml. Raises InvalidInput for the first wrong field."""
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidInput.of("sim", documents, "one mapping, such as `gpus: [{count: 4, memory: 24Gi}]`")
    document: dict[str, Any] = documents[0]
    try:
        return msgspec.convert(_plain(document, ""), SimConfig)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        field = _camel(path.removesuffix("`").lstrip("."))
        if named := re.match(r"(?:Object contains unknown field|Object missing required field) `(\w+)`", text):
            field = f"{field}.{_camel(named[1])}".lstrip(".")
            text = "no such field" if "unknown" in text else "a value: this field must be given"
        raise InvalidInput.of(field or "sim", _look_up(document, field), text[0].lower() + text[1:]) from None


def _plain(value: object, path: str) -> object:
    if isinstance(value, dict):
        found = {}
        for key, inner in value.items():
            name = f"{path}.{key}".lstrip(".")
            if not isinstance(key, str) or key != _camel(key):
                raise InvalidInput.of(name, inner, f"a name like {_camel(str(key))}")
            found[_snake(key)] = _READ[key](inner, name) if key in _READ else _plain(inner, name)
        return found
    if isinstance(value, list):
        return [_plain(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
    return value


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", lambda m: f"_{m[1].lower()}", name)


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda m: m[1].upper(), name)


def _look_up(value: object, path: str) -> object:
    for key in re.findall(r"[A-Za-z]+|\d+", path):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
    return value
