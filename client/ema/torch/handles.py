"""What stands for a streamed weight while its layer does not run: a parameter without memory that can be read."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch.utils import _pytree as pytree

from ema import errors

UNDO = "call ema.torch.unstream(model) first"


class Streamed(errors.EmaError):
    """This cannot be done to a streamed model."""


class Handle(torch.Tensor):
    """A weight whose bytes are elsewhere. Every use reads it; use in place raises `Streamed`.

    It has shape, dtype, device and strides of the weight, and counts as an `nn.Parameter`.
    """

    _is_param = True
    _name: str
    _read: Callable[[], torch.Tensor]

    def __new__(  # noqa: D102
        cls,
        _name: str,
        _read: Callable[[], torch.Tensor],
        shape: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
    ) -> Self:
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way to make one
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def __init__(self, name: str, read: Callable[[], torch.Tensor], *_: object, **__: object) -> None:
        self._name, self._read = name, read

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as torch's documentation has it

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,  # noqa: ANN401
        _types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation gives
        given = kwargs or {}
        if func._schema.is_mutable:  # noqa: SLF001
            for argument, value in _named(func, args, given):
                if argument.is_write and (found := _first(value)) is not None:
                    found.refuse(f"{func} would write to it")
        if func is not torch.ops.aten.detach.default and any(r.alias_info is not None for r in func._schema.returns):  # noqa: SLF001
            return _view(func, args, given)
        with torch.no_grad():
            args, given = pytree.tree_map_only(Handle, lambda h: h.read(), (args, given))
            return func(*args, **given)

    def read(self) -> torch.Tensor:
        """A copy of the weight's bytes, as a plain tensor on the same device. Raises AgentLost, DataLost."""
        return self._read()

    def refuse(self, why: str) -> NoReturn:
        """Raise Streamed."""
        raise Streamed(f"{self._name} is streamed: {why}; {UNDO}")

    def same(self, read: Callable[[], torch.Tensor], like: torch.Tensor) -> "Handle":
        """A part of this weight that is read by `read` and looks `like` this."""
        return Handle(
            self._name,
            read,
            like.shape,
            like.stride(),
            dtype=like.dtype,
            device=self.device,
            requires_grad=False,
        )

    @property
    def data(self) -> torch.Tensor:
        """The weight, without its gradient."""
        return self.same(self._read, self)

    @data.setter
    def data(self, _value: object) -> None:
        self.refuse("its data cannot be set")

    def numpy(self, **more: Any) -> Any:  # noqa: ANN401, D102 - as torch's
        return self.read().numpy(**more)

    def tolist(self) -> Any:  # noqa: ANN401, D102 - as torch's
        return self.read().tolist()

    def __array__(self, *given: Any) -> Any:  # noqa: ANN401
        return self.read().__array__(*given)

    def __dlpack__(self, *given: Any, **more: Any) -> Any:  # noqa: ANN401
        return self.read().__dlpack__(*given, **more)

    def data_ptr(self) -> int:
        """Refused: it has no memory of its own."""
        self.refuse("it has no address")

    def untyped_storage(self) -> Any:  # noqa: ANN401
        """Refused: it has no memory of its own."""
        self.refuse("it has no storage")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = torch.nn.Parameter(self.read(), requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        return torch.nn.Parameter(self.read(), requires_grad=self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Handle({self._name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """What an operation gives that would share memory with a handle: handles, so that nobody writes to a copy."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    base = next(v for v in flat if isinstance(v, Handle))

    def given(look: Callable[[Handle], torch.Tensor]) -> Any:  # noqa: ANN401
        args, kwargs = pytree.tree_unflatten([look(v) if isinstance(v, Handle) else v for v in flat], spec)
        with torch.no_grad():
            return func(*args, **kwargs)

    def part(at: int | None) -> torch.Tensor:
        found = given(Handle.read)
        return found if at is None else found[at]

    looks = given(lambda h: torch.empty_strided(h.shape, h.stride(), dtype=h.dtype, device="meta"))
    if isinstance(looks, torch.Tensor):
        return base.same(partial(part, None), looks)
    return type(looks)(base.same(partial(part, at), look) for at, look in enumerate(looks))


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:  # noqa: ANN401
    """Arguments of the schema and what was given for them."""
    arguments = func._schema.arguments  # noqa: SLF001
    named = list(zip(arguments, args, strict=False))
    return named + [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]


def _first(value: Any) -> Handle | None:  # noqa: ANN401
    if isinstance(value, Handle):
        return value
    if isinstance(value, list | tuple):
        return next((v for v in value if isinstance(v, Handle)), None)
    return None
