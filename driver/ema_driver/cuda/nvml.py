"""NVML: what the CUDA driver does not tell. Memory with what is reserved, links, health, and whether a GPU is gone.

All of it is optional: without NVML there are no health events, and memory comes from CUDA alone.
"""

import importlib
from collections.abc import Sequence
from typing import Final, Self

from ema_core.ids import GpuId
from ema_driver.cuda.api import Raw
from ema_driver.protocol import HealthEvent, HealthKind, MemoryInfo

_GONE: Final = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_GPU_NOT_FOUND", "NVML_ERROR_RESET_REQUIRED")
_XID_OF_ECC: Final = 48


class Nvml:
    """An open NVML. Its calls never raise: a query that fails gives None."""

    def __init__(self, library: Raw, gpus: Sequence[GpuId]) -> None:
        self._nvml = library
        self._gone = {getattr(library, name) for name in _GONE if hasattr(library, name)}
        self._reported: set[GpuId] = set()
        self._devices: dict[GpuId, Raw] = {}
        self._by_index: dict[int, GpuId] = {}
        for gpu in gpus:
            device = self._try("nvmlDeviceGetHandleByUUID", gpu)
            index = None if device is None else self._try("nvmlDeviceGetIndex", device)
            if index is not None:
                self._devices[gpu] = device
                self._by_index[index] = gpu
        self._events = self._listen()

    @classmethod
    def open(cls, gpus: Sequence[GpuId]) -> Self | None:
        """NVML for these GPUs, or None where there is none."""
        try:
            library: Raw = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            library.nvmlInit()
        except library.NVMLError:
            return None
        return cls(library, gpus)

    def memory(self, gpu: GpuId) -> MemoryInfo | None:
        """Bytes of a GPU; None if it does not answer, or nonsense."""
        device = self._devices.get(gpu)
        if device is None:
            return None
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        info = self._try("nvmlDeviceGetMemoryInfo", device, version)
        if info is None:
            info = self._try("nvmlDeviceGetMemoryInfo", device)
        if info is None:
            return None
        return plausible(int(info.total), int(getattr(info, "reserved", 0)), int(info.free))

    def lost(self, gpu: GpuId) -> bool:
        """Whether the GPU is gone. Answers False when in doubt."""
        device = self._devices.get(gpu)
        if device is None:
            return False
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(device)
        except self._nvml.NVMLError as error:
            return error.value in self._gone
        return False

    def nvlink(self, one: GpuId, other: GpuId) -> bool | None:
        """Whether two GPUs reach each other over NVLink; None if NVML does not say."""
        devices = self._devices.get(one), self._devices.get(other)
        index = getattr(self._nvml, "NVML_P2P_CAPS_INDEX_NVLINK", None)
        if None in devices or index is None:
            return None
        status = self._try("nvmlDeviceGetP2PStatus", *devices, index)
        return None if status is None else status == self._nvml.NVML_P2P_STATUS_OK

    def health(self) -> list[HealthEvent]:
        """What was reported since the last call."""
        found = [
            HealthEvent(gpu, HealthKind.LOST, 0, "NVML reports it as lost")
            for gpu in self._devices
            if gpu not in self._reported and self.lost(gpu)
        ]
        self._reported.update(e.gpu for e in found)
        while self._events is not None:
            event = self._try("nvmlEventSetWait_v2", self._events, 0)
            if event is None:
                break
            gpu = self._by_index.get(self._try("nvmlDeviceGetIndex", event.device))
            if gpu is None:
                continue
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                found.append(HealthEvent(gpu, HealthKind.XID, int(event.eventData)))
            else:
                found.append(HealthEvent(gpu, HealthKind.XID, _XID_OF_ECC, "uncorrectable memory error"))
        return found

    def close(self) -> None:
        """End it. NVML counts its users: others in this process keep theirs."""
        if self._events is not None:
            self._try("nvmlEventSetFree", self._events)
            self._events = None
        self._try("nvmlShutdown")

    def _listen(self) -> Raw:
        wanted = self._nvml.nvmlEventTypeXidCriticalError | self._nvml.nvmlEventTypeDoubleBitEccError
        events = self._try("nvmlEventSetCreate")
        if events is None:
            return None
        for device in self._devices.values():
            can = self._try("nvmlDeviceGetSupportedEventTypes", device) or 0
            if can & wanted:
                self._try("nvmlDeviceRegisterEvents", device, can & wanted, events)
        return events

    def _try(self, name: str, *arguments: Raw) -> Raw:
        """A call's result; None if it fails, or the library on this machine has no such function."""
        function = getattr(self._nvml, name, None)
        try:
            return None if function is None else function(*arguments)
        except self._nvml.NVMLError:
            return None


def plausible(total: int, reserved: int, free: int) -> MemoryInfo | None:
    """A memory record, or None if it cannot be true (all ones, zero, more than there is)."""
    used = total - reserved - free
    if not 0 < total < 1 << 60 or min(reserved, free, used) < 0:
        return None
    return MemoryInfo(total, reserved, used, free)
