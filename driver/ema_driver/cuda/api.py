"""The CUDA driver API: loaded late, called by name, its result codes made the Protocol's errors."""

import importlib
from typing import Any, Final, TypeAlias

from ema_driver.errors import ContextLost, DeviceLost, DriverError, DriverUnavailable, InvalidUse

Raw: TypeAlias = Any
"""A value of the bindings, which publish no types."""

INSTALL: Final = "install it with `pip install '.[cuda]'` in EMA's source folder"

NOT_READY: Final = 600
OUT_OF_MEMORY: Final = 2
NO_DEVICE: Final = 100
_MISUSE: Final = frozenset({
    "INVALID_VALUE", "INVALID_HANDLE", "NOT_FOUND", "INVALID_CONTEXT", "ALREADY_MAPPED", "NOT_MAPPED", "MAP_FAILED",
    "UNMAP_FAILED", "HOST_MEMORY_ALREADY_REGISTERED", "HOST_MEMORY_NOT_REGISTERED", "NOT_PERMITTED", "NOT_SUPPORTED",
    "STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED", "INVALID_DEVICE",
})  # fmt: skip
_GONE: Final = frozenset({"DEVICE_UNAVAILABLE", "NO_DEVICE"})
_STICKY: Final = frozenset({
    "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "ASSERT",
    "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC",
    "CONTEXT_IS_DESTROYED", "CONTAINED", "TENSOR_MEMORY_LEAK", "EXTERNAL_DEVICE", "SYSTEM_NOT_READY", "DEINITIALIZED",
})  # fmt: skip
"""Every later call of the process fails alike."""


class NoMemory(DriverError):
    """CUDA has no memory for this call. Whoever knows place and size makes it an OutOfMemory."""


class Api:
    """The driver's functions and constants. One per session: it remembers that the session is lost."""

    def __init__(self) -> None:
        """Load and initialise the driver. Raises DriverUnavailable."""
        self.lost = ""
        """Why every call fails from now on; empty while they do not."""
        try:
            self.cu: Raw = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            text = f"looked for the Python package cuda-bindings ({error})"
            raise DriverUnavailable(f"{text}; {INSTALL}") from None
        try:
            code = int(self.cu.cuInit(0)[0])
        except RuntimeError as error:
            text = f"looked for the NVIDIA driver's libcuda.so.1 ({error})"
            raise DriverUnavailable(f"{text}; install the NVIDIA driver, or give this container a GPU") from None
        if code == NO_DEVICE:
            raise DriverUnavailable(
                "looked for an NVIDIA GPU and found none; give this container one, or see nvidia-smi"
            )
        if code:
            raise DriverUnavailable(f"the NVIDIA driver does not start: {self._name(code)}; see nvidia-smi and dmesg")

    def call(self, name: str, *arguments: Raw) -> Raw:
        """Call a driver function; its result, if it has one.

        Raises NoMemory, InvalidUse, DeviceLost, ContextLost, DriverUnavailable (the driver is too old for it), or
        DriverError.
        """
        code, *results = self._raw(name, arguments)
        if code := int(code):
            raise self.error(name, code)
        return results[0] if results else None

    def done(self, name: str, *arguments: Raw) -> bool:
        """Call a query that is either done or not ready yet. Raises like `call`."""
        code = int(self._raw(name, arguments)[0])
        if code == NOT_READY:
            return False
        if code:
            raise self.error(name, code)
        return True

    def attribute(self, name: str, device: Raw) -> int:
        """A device attribute, or 0 where this driver has no such attribute."""
        number = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if number is None:
            return 0
        try:
            return int(self.call("cuDeviceGetAttribute", number, device))
        except InvalidUse:
            return 0

    def check(self) -> None:
        """Raise ContextLost if the session is lost."""
        if self.lost:
            raise ContextLost(self.lost)

    def _raw(self, name: str, arguments: tuple[Raw, ...]) -> Raw:
        self.check()
        try:
            return getattr(self.cu, name)(*arguments)
        except (AttributeError, RuntimeError) as error:
            # A binding raises RuntimeError for a function that the library on this machine does not have.
            raise DriverUnavailable(f"{name} is not to be had ({error}); a newer NVIDIA driver is needed") from None

    def error(self, name: str, code: int) -> DriverError:
        """What a driver function's result code says."""
        error = self._name(code)
        text = f"{name}: CUDA_ERROR_{error} ({code})"
        if code == OUT_OF_MEMORY:
            return NoMemory(text)
        if error in _STICKY or (error == "UNKNOWN" and int(self.cu.cuMemGetInfo()[0])):
            # `UNKNOWN` is how a GPU that fell off the bus may show, but also what a foreign descriptor is refused with.
            self.lost = f"{text}; this process must start again"
            return ContextLost(self.lost)
        if error in _GONE:
            return DeviceLost(text)
        return InvalidUse(text) if error in _MISUSE else DriverError(text)

    def _name(self, code: int) -> str:
        try:
            return str(self.cu.CUresult(code).name).removeprefix("CUDA_ERROR_")
        except ValueError:
            return f"code {code}"
