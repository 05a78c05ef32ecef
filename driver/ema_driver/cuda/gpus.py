"""The GPUs that a session sees: identity, context, and the ways between them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from ema_core.ids import HOST, GpuId, Place
from ema_driver.cuda.api import Api, Raw
from ema_driver.cuda.nvml import Nvml, plausible
from ema_driver.errors import DriverError, DriverUnavailable
from ema_driver.protocol import Device, Link, MemoryInfo

NVLINK_RATE: Final = 370_000_000_000
PEER_PCIE_RATE: Final = 50_000_000_000
HOST_RATE: Final = 55_000_000_000
"""Bytes per second, one way. Claims: NVLink 4 and PCIe 5 by public figures, host to GPU as measured on an H200."""

_NEEDED: Final = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "mapping of physical memory at reserved addresses",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory handles that are file descriptors",
    "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "host memory behind the same handles",
}
_NO_NUMA: Final = 99
"""Some drivers say 99 for no NUMA node."""


class Gpu:
    """One GPU of this process."""

    def __init__(self, api: Api, ordinal: int) -> None:
        self._api = api
        self.ordinal = ordinal
        self.device = api.call("cuDeviceGet", ordinal)
        self.id = GpuId(Place(f"GPU-{UUID(bytes=bytes(api.call('cuDeviceGetUuid', self.device).bytes))}"))
        self._context: Raw = None
        self._lock = threading.Lock()

    def missing(self) -> str:
        """What this GPU or its driver lacks of what is needed; empty if nothing."""
        lacks = [what for name, what in _NEEDED.items() if not self._api.attribute(name, self.device)]
        return ", ".join(lacks)

    def describe(self, total: int | None) -> Device:
        """The Protocol's record. `total` is NVML's, which counts reserved bytes too."""
        call = self._api.call
        numa = self.numa
        return Device(
            id=self.id,
            index=self.ordinal,
            product=_text(call("cuDeviceGetName", 96, self.device)),
            total=int(call("cuDeviceTotalMem", self.device)) if total is None else total,
            numa=None if numa < 0 or numa >= _NO_NUMA else numa,
            pci=_text(call("cuDeviceGetPCIBusId", 32, self.device)),
        )

    @property
    def numa(self) -> int:
        """The NUMA node of the host beside this GPU, as the driver says it."""
        return self._api.attribute("HOST_NUMA_ID", self.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU's context the thread's own for a while. Other users of the thread (torch) see no change."""
        with self._lock:
            # Made when first needed: a context costs about 520 MiB of its GPU.
            if self._context is None:
                self._context = self._api.call("cuDevicePrimaryCtxRetain", self.device)
        self._api.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._api.cu.cuCtxPopCurrent()

    def memory(self) -> MemoryInfo | None:
        """Bytes as CUDA says them: nothing is known of what is reserved."""
        try:
            with self.current():
                code, free, total = self._api.cu.cuMemGetInfo()
        except DriverError:
            return None
        return None if int(code) else plausible(int(total), 0, int(free))

    def reaches(self, other: "Gpu") -> bool:
        """Whether this GPU can access the other's memory, as the driver claims."""
        return self is other or bool(self._api.call("cuDeviceCanAccessPeer", self.device, other.device))

    def nvlink(self, other: "Gpu") -> bool:
        """Whether the way to the other is NVLink, by what only NVLink can do: native atomics between peers."""
        kind = self._api.cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(self._api.call("cuDeviceGetP2PAttribute", kind, self.device, other.device))

    def close(self) -> None:
        """Give the context up; it lives on while somebody else in this process uses it."""
        with self._lock:
            if self._context is not None:
                self._context = None
                self._api.cu.cuDevicePrimaryCtxRelease(self.device)


def visible(api: Api) -> list[Gpu]:
    """The GPUs that can serve, in CUDA's order. Raises DriverUnavailable if none can."""
    gpus = [Gpu(api, i) for i in range(int(api.call("cuDeviceGetCount")))]
    if not gpus:
        raise DriverUnavailable("looked for an NVIDIA GPU and found none; give this container one, or see nvidia-smi")
    lacking = {g.id: g.missing() for g in gpus}
    able = [g for g in gpus if not lacking[g.id]]
    if not able:
        why = "; ".join(f"{gpu} lacks {what}" for gpu, what in lacking.items())
        raise DriverUnavailable(f"no GPU here can lend: {why}. A newer GPU or driver is needed")
    return able


def links(gpus: Sequence[Gpu], nvml: Nvml | None) -> list[Link]:
    """Every ordered pair that the driver claims."""
    found = []
    for source in gpus:
        found += [Link(HOST, source.id, "pcie", HOST_RATE), Link(source.id, HOST, "pcie", HOST_RATE)]
        for target in gpus:
            if source is target or not (source.reaches(target) and target.reaches(source)):
                continue
            said = nvml.nvlink(source.id, target.id) if nvml is not None else None
            fast = source.nvlink(target) if said is None else said
            kind, rate = ("nvlink", NVLINK_RATE) if fast else ("pcie", PEER_PCIE_RATE)
            found.append(Link(source.id, target.id, kind, rate))
    return found


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace").strip()
