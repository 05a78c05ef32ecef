"""The simulated server: places, lanes, what devices report, and the faults they have."""

import random
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from ema_core.ids import HOST, GpuId, Place
from ema_driver.errors import InvalidUse
from ema_driver.protocol import Device, HealthEvent, HealthKind, Link, MemoryInfo
from ema_driver.sim import faults
from ema_driver.sim.config import SimConfig
from ema_driver.sim.server.accounts import Accounts
from ema_driver.sim.server.lanes import Lane
from ema_driver.sim.server.loop import Loop
from ema_driver.sim.server.pages import Pages
from ema_driver.sim.server.space import Mapped

_NAMES = uuid.UUID("6f1d2f0e-5b0b-4b52-9a68-1f6d1c9d1c11")


class Tenant(Protocol):
    """A session, as far as devices know it."""

    def report(self, event: HealthEvent) -> None:
        """Something happened to a device."""

    def device_lost(self, gpu: GpuId) -> None:
        """The device is gone."""


def gpu_id(number: int) -> GpuId:
    """The UUID of a GPU by its number in the configuration."""
    return GpuId(Place(f"GPU-{uuid.uuid5(_NAMES, str(number))}"))


class Machine:
    """Everything that sessions share."""

    def __init__(self, config: SimConfig, loop: Loop) -> None:
        self.config, self.loop = config, loop
        self.pages = Pages(loop)
        groups = [group for group in config.gpus for _ in range(group.count)]
        self.ids = [gpu_id(number) for number in range(len(groups))]
        self._groups = dict(zip(self.ids, groups, strict=True))
        order = list(range(len(groups)))
        if config.shuffle_enumeration:
            random.Random(config.seed).shuffle(order)  # noqa: S311  (no secret)
        self._order = [self.ids[number] for number in order]
        capacity: dict[Place, int] = {gpu: group.memory - group.reserved for gpu, group in self._groups.items()}
        self.accounts = Accounts(capacity | {HOST: config.host_memory}, loop)
        self._links = self._claimed_links()
        self._lanes = {(link.source, link.target): self._lane(link) for link in self._links}
        self.tenants: set[Tenant] = set()
        self._dead: dict[GpuId, faults.LostGpu | faults.RemovedGpu] = {}
        self._memory_faults: dict[GpuId, faults.Fault] = {}
        self._hung: set[GpuId] = set()
        self._held_back: list[Callable[[], None]] = []
        for fault in config.faults:
            self.inject(fault)

    def _claimed_links(self) -> list[Link]:
        config = self.config
        rates = {"nvlink": config.nvlink_rate, "pcie": config.pcie_rate, "local": config.local_rate}
        places: list[Place] = [*self.ids, HOST]
        kinds: dict[tuple[Place, Place], tuple[str, int]] = {}
        for source in places:
            for target in places:
                kind = "local" if source == target else "pcie" if HOST in {source, target} else config.link
                kinds[source, target] = kind, rates[kind]
        for override in config.links:
            pair = self.place(override.source), self.place(override.target)
            kinds[pair] = override.kind, override.rate or rates.get(override.kind, 0)
        return [Link(source, target, kind, rate) for (source, target), (kind, rate) in kinds.items() if kind != "none"]

    def _lane(self, link: Link) -> Lane:
        rate, latency = (link.rate, self.config.latency) if self.config.link_delays else (0, 0.0)
        return Lane(self.loop, rate, latency, self._settle)

    def _settle(self, part: Mapped) -> None:
        self.accounts.settle(part.allocation)

    def place(self, number: int) -> Place:
        """A place by its number in the configuration. Raises InvalidUse."""
        if number >= len(self.ids):
            raise InvalidUse(f"fault: no GPU {number}; there are {len(self.ids)}, numbered from 0")
        return HOST if number < 0 else self.ids[number]

    def lane(self, source: Place, target: Place) -> Lane | None:
        """The way from source to target, or None where there is none."""
        return self._lanes.get((source, target))

    def alive(self, place: Place) -> bool:
        """Whether the place can be used."""
        return place not in self._dead

    def devices(self) -> list[Device]:
        """What is enumerated now, in today's order."""
        return [
            Device(gpu, index, group.product, group.memory, group.numa, f"00000000:{16 + self.ids.index(gpu):02X}:00.0")
            for index, gpu in enumerate(
                gpu for gpu in self._order if not isinstance(self._dead.get(gpu), faults.RemovedGpu)
            )
            for group in (self._groups[gpu],)
        ]

    def links(self) -> list[Link]:
        """Claimed by the driver, true or not."""
        present = {device.id for device in self.devices()} | {HOST}
        return [link for link in self._links if link.source in present and link.target in present]

    def memory(self, places: Iterable[Place]) -> dict[Place, MemoryInfo]:
        """Of each place that answers with a record that can be true."""
        self.accounts.collect()
        records = {place: self._record(place) for place in places}
        return {place: record for place, record in records.items() if record is not None and _plausible(record)}

    def _record(self, place: Place) -> MemoryInfo | None:
        used, free = self.accounts.used[place], self.accounts.free(place)
        if place == HOST:
            return MemoryInfo(used + free, 0, used, free)
        gpu = GpuId(place)
        fault = self._memory_faults.get(gpu)
        if gpu in self._dead or isinstance(fault, faults.UnsupportedMemory):
            return None
        if isinstance(fault, faults.NonsenseMemory):
            ones = 2**64 - 1
            return MemoryInfo(ones, ones, ones, ones)
        reserved = self._groups[gpu].reserved
        return MemoryInfo(reserved + used + free, reserved, used, free)

    def when_queries_return(self, places: Iterable[Place], callback: Callable[[], None]) -> None:
        """Call back now, or once no device of `places` hangs any more."""
        if self._hung.isdisjoint(places):
            callback()
        else:
            self._held_back.append(lambda: self.when_queries_return(places, callback))

    def inject(self, fault: faults.Fault) -> None:
        """Let a fault happen. Raises InvalidUse."""
        match fault:
            case faults.LostGpu() | faults.RemovedGpu():
                self._lose(fault)
            case faults.Xid():
                self._report(self._gpu(fault.gpu), HealthKind.XID, fault.code, f"XID {fault.code}")
            case faults.HungQueries():
                self._hung.add(self._gpu(fault.gpu))
            case faults.RefusedMemory():
                self.accounts.refused[self.place(fault.place)] = fault.creates or -1
            case faults.RefusedMapping():
                self.accounts.unmappable[self.place(fault.place)] = fault.after, fault.maps or -1
            case faults.StuckMemory():
                self.accounts.stuck.add(self.place(fault.place))
            case faults.UnsupportedMemory() | faults.NonsenseMemory():
                self._memory_faults[self._gpu(fault.gpu)] = fault
            case _:
                self._spoil_link(fault)

    def clear(self, fault: faults.Fault) -> None:
        """Undo a fault; harmless if it did not happen. Raises InvalidUse."""
        match fault:
            case faults.LostGpu() | faults.RemovedGpu():
                gpu = self._gpu(fault.gpu)
                if self._dead.pop(gpu, None) is not None:
                    self._report(gpu, HealthKind.RECOVERED, 0, "the GPU is back; what was on it is gone")
            case faults.Xid():
                self._report(self._gpu(fault.gpu), HealthKind.RECOVERED, fault.code, f"XID {fault.code} is over")
            case faults.HungQueries():
                self._hung.discard(self._gpu(fault.gpu))
                held, self._held_back = self._held_back, []
                for callback in held:
                    callback()
            case faults.RefusedMemory():
                self.accounts.refused.pop(self.place(fault.place), None)
            case faults.RefusedMapping():
                self.accounts.unmappable.pop(self.place(fault.place), None)
            case faults.StuckMemory():
                self.accounts.stuck.discard(self.place(fault.place))
            case faults.UnsupportedMemory() | faults.NonsenseMemory():
                self._memory_faults.pop(self._gpu(fault.gpu), None)
            case _:
                self._clear_link(fault)

    def _spoil_link(self, fault: faults.LyingPair | faults.SlowLink | faults.HungLink) -> None:
        lane = self._pair(fault.source, fault.target)
        match fault:
            case faults.LyingPair():
                lane.lie = fault.how
            case faults.SlowLink():
                lane.factor = fault.factor
            case faults.HungLink():
                lane.hung = True

    def _clear_link(self, fault: faults.LyingPair | faults.SlowLink | faults.HungLink) -> None:
        lane = self._pair(fault.source, fault.target)
        match fault:
            case faults.LyingPair():
                lane.lie = ""
            case faults.SlowLink():
                lane.factor = 1.0
            case faults.HungLink():
                lane.hung = False
                lane.resume()

    def _lose(self, fault: faults.LostGpu | faults.RemovedGpu) -> None:
        gpu = self._gpu(fault.gpu)
        if gpu in self._dead:
            self._dead[gpu] = fault
            return
        self._dead[gpu] = fault
        self.accounts.lose(gpu)
        if isinstance(fault, faults.LostGpu):
            self._report(gpu, HealthKind.LOST, 0, "the GPU has fallen off the bus")
        for tenant in tuple(self.tenants):
            tenant.device_lost(gpu)

    def _gpu(self, number: int) -> GpuId:
        return GpuId(self.place(number))

    def _pair(self, source: int, target: int) -> Lane:
        lane = self.lane(self.place(source), self.place(target))
        if lane is None:
            raise InvalidUse(f"fault: there is no path from {source} to {target}")
        return lane

    def _report(self, gpu: GpuId, kind: HealthKind, code: int, message: str) -> None:
        event = HealthEvent(gpu, kind, code, message)
        for tenant in self.tenants:
            tenant.report(event)


def _plausible(record: MemoryInfo) -> bool:
    parts = (record.reserved, record.used, record.free)
    return record.total < 2**60 and all(0 <= part <= record.total for part in parts) and sum(parts) == record.total
