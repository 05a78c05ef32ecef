"""torch tensors over memory that the driver mapped: at one address, or composed of several pieces."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from ema import errors
from ema_driver.errors import DriverError, OutOfMemory
from ema_driver.protocol import WORD_BYTES, CpuVisible, GpuVisible

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema_driver.protocol import Address, Handle, Words

_CUDA: Final = 2
_UNSIGNED: Final = 1
"""DLPack's codes for a CUDA device and for unsigned integers."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


_libc = ctypes.CDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def device_of(pool: "Pool") -> torch.device:
    """Where torch sees the memory of the pool's own GPU: the CPU, where GPUs are simulated."""
    if isinstance(pool.driver, CpuVisible):
        return torch.device("cpu")
    wanted = pool.gpu.removeprefix("GPU-")
    for ordinal in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(ordinal).uuid) == wanted:
            return torch.device("cuda", ordinal)
    raise errors.EmaError(f"torch does not see {pool.gpu}; see CUDA_VISIBLE_DEVICES and torch.cuda.is_available()")


def bytes_at(pool: "Pool", address: int, size: int) -> torch.Tensor:
    """`size` mapped bytes of the pool's own GPU as a tensor (uint8). It must not be used once they are unmapped."""
    view = pool.view(address, size)
    if view is not None:
        return torch.frombuffer(view, dtype=torch.uint8)
    return _on_gpu(address, size, device_of(pool).index)


def word_at(pool: "Pool", page: "Words", index: int) -> torch.Tensor:
    """A word of a page (int32, one element) as kernels of the pool's own GPU see it."""
    if not isinstance(page, GpuVisible):
        raise errors.EmaError(f"kernels do not see the pages of driver {pool.driver.name!r}")
    return _on_gpu(page.pointer + WORD_BYTES * index, WORD_BYTES, device_of(pool).index).view(torch.int32)


class Range:
    """One address range of the own GPU with pieces of memory behind it, seen as one tensor of bytes.

    The same memory may be part of many ranges: their bytes are then the same.
    """

    def __init__(self, pool: "Pool", pieces: Sequence["Handle | int"]) -> None:
        """Each piece is memory that is there already, or a number of bytes to create. Raises OutOfMemory."""
        self._driver = driver = pool.driver
        self._own: list[Handle] = []
        self._mapped: list[Address] = []
        sizes = [p if isinstance(p, int) else p.size for p in pieces]
        self.size = 0
        self.bytes = torch.empty(0, dtype=torch.uint8)
        try:
            self._address = driver.reserve(sum(sizes))
            self.size = sum(sizes)
            at = int(self._address)
            for piece, size in zip(pieces, sizes, strict=True):
                handle = self._create(pool, size) if isinstance(piece, int) else piece
                driver.map([(type(self._address)(at), handle)])
                self._mapped.append(type(self._address)(at))
                at += size
            self.bytes = bytes_at(pool, int(self._address), self.size)
        except OutOfMemory as error:
            self.close()
            raise errors.OutOfMemory(str(error)) from error
        except DriverError as error:
            self.close()
            raise errors.EmaError(f"the driver refused: {error}") from error

    def close(self) -> None:
        """Unmap all, and give back what was created here. Nothing may use the bytes any more. Twice is harmless."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        # Each is forgotten before it is given back: if this is interrupted, the rest goes with the session.
        mapped, self._mapped = self._mapped, []
        self._driver.unmap(mapped)
        size, self.size = self.size, 0
        if size:
            self._driver.unreserve([self._address])
        own, self._own = self._own, []
        self._driver.release(own)

    def _create(self, pool: "Pool", size: int) -> "Handle":
        handle = self._driver.create(pool.gpu, size)
        self._own.append(handle)
        return handle


def _on_gpu(address: int, size: int, ordinal: int) -> torch.Tensor:
    # DLPack without a deleter: one in Python would run when the interpreter is gone already. torch looks at the
    # description again when the tensor ends, which may be after everything else: so its hundred bytes are never freed.
    there = _libc.calloc(1, ctypes.sizeof(_DLTensor))
    described = _DLTensor.from_address(there)
    described.data, described.device_type, described.device_id = address, _CUDA, ordinal
    described.ndim, described.code, described.bits, described.lanes = 1, _UNSIGNED, 8, 1
    described.length = size
    described.shape = ctypes.cast(there + _DLTensor.length.offset, ctypes.POINTER(ctypes.c_int64))
    return torch.from_dlpack(_new_capsule(there, b"dltensor", None))
