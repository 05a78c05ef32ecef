"""What autograd keeps in place of a saved tensor, and how it becomes that tensor again."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ema.errors import EmaError
    from ema.torch.spill_step import Step

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {saved} instead"
)


class Item:
    """One storage that a step saved, however many views of it were. It lives as long as autograd needs any of them."""

    __slots__ = ("__weakref__", "aside", "data", "index", "lost", "numbers", "size", "spilled")

    def __init__(self, index: int, size: int, *, numbers: bool) -> None:
        self.index, self.size, self.numbers = index, size, numbers
        """Place among the step's items; bytes; whether they are floating-point numbers."""
        self.spilled = False
        """Its bytes are elsewhere: with a neighbour, or aside."""
        self.aside: torch.Tensor | None = None
        """The bytes in ordinary host memory, where a step that is watched keeps them if it is to."""
        self.data: torch.Tensor | None = None
        """The bytes (uint8), once they are back."""
        self.lost: EmaError | None = None
        """Why they will never be back."""


class Saved:
    """One saved tensor: the tensor itself, or what it takes to see it in the bytes of a spilled item.

    Autograd does not look at version counters of what hooks packed, so this does: a tensor that was changed in place
    after it was saved is an error when it is used, spilled or not.
    """

    __slots__ = ("_dtype", "_offset", "_shape", "_strides", "_tensor", "_version", "_witness", "item", "step")

    def __init__(self, tensor: torch.Tensor, step: "Step | None" = None, item: Item | None = None) -> None:
        """`tensor` is what a pack hook is given: an alias that shares its version counter with the original."""
        self.step, self.item = step, item
        self._version = tensor._version  # noqa: SLF001 - its documented name
        self._tensor: torch.Tensor | None = tensor
        self._witness = tensor
        if item is not None and item.spilled:
            self._dtype, self._shape, self._strides = tensor.dtype, tensor.shape, tensor.stride()
            self._offset = tensor.storage_offset()
            self._tensor = None
            # Another alias without the bytes: it counts the same versions, and holds no memory.
            self._witness = tensor.detach()
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, if the tensor was changed in place since it was saved."""
        now = self._witness._version  # noqa: SLF001
        if now != self._version:
            shape = list(self._witness.shape if self._tensor is not None else self._shape)
            kind = self._witness.type()
            raise RuntimeError(_CHANGED.format(kind=kind, shape=shape, now=now, saved=self._version))

    def tensor(self) -> torch.Tensor:
        """The tensor; a spilled item's bytes must be back."""
        if self._tensor is not None:
            return self._tensor
        assert self.item is not None  # noqa: S101 - only items are spilled
        assert self.item.data is not None  # noqa: S101 - brought back by who calls this
        data = self.item.data
        seen = torch.empty(0, dtype=self._dtype, device=data.device)
        return seen.set_(data.untyped_storage(), self._offset, self._shape, self._strides)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind a tensor (uint8)."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether it is nothing but strided bytes on this device: what can be spilled."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device == device
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
