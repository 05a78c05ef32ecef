"""Strict reading of plain parsed YAML or JSON into msgspec structs: finds every wrong field, not just the first."""

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from ema_core.errors import FieldError, InvalidInput

S = TypeVar("S", bound=msgspec.Struct)
Parser = Callable[[object, str], object]
"""From a value and its field's path to what the struct holds; raises InvalidInput."""


def read(kind: type[S], value: object, *, path: str, parsers: Mapping[object, Parser]) -> S:
    """Make a `kind` of `value`. Annotations that are keys of `parsers` are read by those; fields of structs recurse.

    Raises InvalidInput with every wrong, missing and unknown field below `path`.
    """
    errors: list[FieldError] = []
    result = _Reader(parsers, errors).struct(kind, value, path)
    if errors:
        raise InvalidInput(errors)
    return cast(S, result)


class _Reader:
    """One pass over a document. A value that could not be read is None and its error is in `errors`."""

    def __init__(self, parsers: Mapping[object, Parser], errors: list[FieldError]) -> None:
        self.parsers = parsers
        self.errors = errors

    def struct(self, kind: type[msgspec.Struct], value: object, path: str) -> msgspec.Struct | None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        if not isinstance(value, dict):
            self.errors.append(FieldError(path, value, f"a mapping with {', '.join(fields)}"))
            return None
        before = len(self.errors)
        if kind.__struct_config__.forbid_unknown_fields:
            self.errors += [
                FieldError(_join(path, name), value[name], f"no such field; there are {', '.join(fields)}")
                for name in value
                if name not in fields
            ]
        read = {
            field.name: self.value(field.type, value[name], _join(path, name))
            for name, field in fields.items()
            if name in value and not self._is_left_out(field, value[name])
        }
        self.errors += [
            FieldError(_join(path, name), None, "a value: this field must be given")
            for name, field in fields.items()
            if field.required and field.name not in read
        ]
        return kind(**read) if len(self.errors) == before else None

    @staticmethod
    def _is_left_out(field: FieldInfo, value: object) -> bool:
        """YAML's `headroom:` with nothing behind it means the default, as it does in Kubernetes."""
        return value is None and not field.required

    def value(self, annotation: Any, value: object, path: str) -> object:  # noqa: ANN401 (an annotation is anything)
        try:
            if annotation in self.parsers:
                return self.parsers[annotation](value, path)
            if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
                return self.struct(annotation, value, path)
            if get_origin(annotation) in {UnionType, Union}:
                (inner,) = (choice for choice in get_args(annotation) if choice is not type(None))
                return None if value is None else self.value(inner, value, path)
            if get_origin(annotation) is tuple:
                return self._items(get_args(annotation)[0], value, path)
            return msgspec.convert(value, annotation)
        except InvalidInput as refused:
            self.errors += refused.errors
        except msgspec.ValidationError:
            self.errors.append(FieldError(path, value, _described(annotation)))
        return None

    def _items(self, item: Any, value: object, path: str) -> object:  # noqa: ANN401
        if not isinstance(value, list):
            self.errors.append(FieldError(path, value, "a list"))
            return None
        return tuple(self.value(item, one, f"{path}[{index}]") for index, one in enumerate(value))


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _described(annotation: Any) -> str:  # noqa: ANN401
    """What a plain annotation accepts, in words."""
    members = getattr(annotation, "__members__", None)
    if members is not None:
        return "one of " + ", ".join(str(member.value) for member in members.values())
    if get_origin(annotation) is not None and get_origin(annotation).__name__ == "Literal":
        return "one of " + ", ".join(map(str, get_args(annotation)))
    words = {str: "a string", int: "a whole number", bool: "true or false", float: "a number"}
    return words.get(annotation, "a mapping of strings to strings")
