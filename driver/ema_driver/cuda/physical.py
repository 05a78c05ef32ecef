"""Physical memory: what a handle is made of, where it may be reached from, and how an imported one is verified."""

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ema_core.ids import HOST, Place
from ema_driver.cuda.api import Api, Raw
from ema_driver.cuda.gpus import Gpu
from ema_driver.errors import ContextLost, DriverError, InvalidUse


@dataclass(slots=True, eq=False)
class CudaHandle:
    """A hold on physical memory. `raw` is CUDA's handle, None once it is released."""

    place: Place
    size: int
    raw: Raw
    api: Api


class Physical:
    """Properties and access rights of memory at each place. Callers have the home GPU's context current."""

    def __init__(self, api: Api, gpus: Mapping[Place, Gpu], home: Gpu) -> None:
        self._api, self._home = api, home
        cu = api.cu
        kinds = cu.CUmemLocationType
        self._device, self._host = kinds.CU_MEM_LOCATION_TYPE_DEVICE, kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA
        self._descriptor = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._places = {gpu.ordinal: place for place, gpu in gpus.items()}
        self._properties = {place: self._property(self._device, gpu.ordinal) for place, gpu in gpus.items()}
        self._properties[HOST] = self._property(self._host, max(0, home.numa))
        self._access = {
            place: [self._right(other) for other in gpus.values() if other.reaches(gpu)] for place, gpu in gpus.items()
        }
        self._access[HOST] = [self._right(gpu) for gpu in gpus.values()]
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = max(
            int(api.call("cuMemGetAllocationGranularity", p, least)) for p in self._properties.values()
        )
        """Bytes; one for all places, so that any memory fits behind any address."""

    def create(self, place: Place, size: int) -> Raw:
        """New memory, with anybody's bytes in it."""
        return self._api.call("cuMemCreate", size, self._properties[place], 0)

    def knows(self, place: Place) -> bool:
        """Whether this session can create memory there."""
        return place in self._properties

    def export(self, raw: Raw) -> int:
        """A descriptor of the memory, close-on-exec."""
        fd = int(self._api.call("cuMemExportToShareableHandle", raw, self._descriptor, 0))
        os.set_inheritable(fd, False)
        return fd

    def adopt(self, fd: int, size: int) -> tuple[Raw, Place]:
        """Import memory of `size` bytes; its handle and place. Raises InvalidUse."""
        refusal = f"adopt: descriptor {fd!r} is no memory of the CUDA driver"
        try:
            if not stat.S_ISCHR(os.fstat(fd).st_mode):
                raise InvalidUse(refusal)
        except (OSError, TypeError) as error:
            raise InvalidUse(f"{refusal} ({error})") from None
        call = self._api.call
        with ExitStack() as undo:
            try:
                raw = call("cuMemImportFromShareableHandle", fd, self._descriptor)
            except ContextLost:
                raise
            except DriverError as error:
                raise InvalidUse(f"{refusal} ({error})") from None
            undo.callback(call, "cuMemRelease", raw)
            location = call("cuMemGetAllocationPropertiesFromHandle", raw).location
            place = HOST if location.type == self._host else self._places.get(int(location.id))
            if place is None or location.type not in {self._host, self._device}:
                raise InvalidUse(f"adopt: descriptor {fd} is memory of a place that this session does not see")
            self._verify(raw, size)
            undo.pop_all()
        return raw, place

    def map(self, address: int, raw: Raw, size: int, place: Place) -> None:
        """Map all of a handle's memory, for every GPU that reaches it."""
        rights = self._access[place]
        self._api.call("cuMemMap", address, size, 0, raw, 0)
        try:
            self._api.call("cuMemSetAccess", address, size, rights, len(rights))
        except DriverError:
            self._api.cu.cuMemUnmap(address, size)
            raise

    def _verify(self, raw: Raw, size: int) -> None:
        """CUDA tells no size of a handle, but maps it only in its full one."""
        call = self._api.call
        address = call("cuMemAddressReserve", size, 0, 0, 0)
        try:
            call("cuMemMap", address, size, 0, raw, 0)
            call("cuMemUnmap", address, size)
        except InvalidUse:
            raise InvalidUse(f"adopt: size {size}; the memory has another") from None
        finally:
            self._api.cu.cuMemAddressFree(address, size)

    def _property(self, kind: Raw, number: int) -> Raw:
        found = self._api.cu.CUmemAllocationProp()
        found.type = self._api.cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.requestedHandleTypes = self._descriptor
        found.location.type, found.location.id = kind, number
        return found

    def _right(self, gpu: Gpu) -> Raw:
        right = self._api.cu.CUmemAccessDesc()
        right.location.type, right.location.id = self._device, gpu.ordinal
        right.flags = self._api.cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return right


def distinct(handles: Sequence[object], api: Api, what: str) -> list[CudaHandle]:
    """These handles, if each is of this session, not released, and named once. Raises InvalidUse."""
    found: list[CudaHandle] = []
    for handle in handles:
        if not isinstance(handle, CudaHandle) or handle.api is not api:
            raise InvalidUse(f"{what}: {handle!r} is no handle of this session")
        if handle.raw is None:
            raise InvalidUse(f"{what}: {handle!r} is released")
        found.append(handle)
    if len({id(h) for h in found}) != len(found):
        raise InvalidUse(f"{what}: a handle is named twice")
    return found
