"""The node as the policy sees it: what each GPU has, what others use of it, which paths are verified.

`used` is what the driver shows in use, less what we hold there ourselves, plus what a share was promised and has not
taken yet. While our own memory at a place is changing on a worker thread the two readings do not fit together; then the
last good one stands.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ema_core.errors import InvalidInput
from ema_core.ids import HOST, GpuId, Place
from ema_core.state import Gpu
from ema_driver.protocol import Device, MemoryDriver, MemoryInfo


@dataclass(slots=True)
class Unseen:
    """Bytes that were released and that the driver has not shown free yet."""

    size: int
    others: int
    """Bytes that others used before."""


REST: Final = 0.1
"""Seconds for which a place that failed is left alone."""


class Node:
    """GPUs, their memory and their verified paths. Belongs to the agent's loop."""

    def __init__(self, driver: MemoryDriver, *, loopback: bool = False) -> None:
        self._driver = driver
        self.loopback = loopback
        """Whether a GPU lends to its own clients, too: to measure lending where there is only one."""
        self.devices: dict[GpuId, Device] = {}
        self.paths: dict[tuple[Place, Place], int] = {}
        self.barred: dict[tuple[Place, Place], str] = {}
        """Pairs that must not be used, with the reason."""
        self.skipped: dict[GpuId, str] = {}
        """GPUs that cannot serve, with the reason."""
        self.unhealthy: dict[GpuId, str] = {}
        self.lost: dict[GpuId, str] = {}
        """GPUs whose bytes are gone, with the reason, until they are healthy again."""
        self.draining: set[Place] = set()
        self.memory: Mapping[Place, MemoryInfo] = {}
        self.ours: dict[Place, int] = defaultdict(int)
        """Bytes of chunks that we hold physically on each GPU."""
        self.leaked: dict[GpuId, int] = {}
        """Bytes that we released and that the driver still shows in use: an alarm, not a proof, for somebody else may
        have taken as much in the same moment. It ends when the bytes are seen free."""
        self._unseen: dict[GpuId, Unseen] = {}
        self.promised: dict[GpuId, int] = defaultdict(int)
        """Bytes that shares were promised and have not mapped yet."""
        self._mapped: dict[GpuId, int] = defaultdict(int)
        """Bytes that shares have mapped since the reading in `_used` began."""
        self.withheld: dict[GpuId, int] = defaultdict(int)
        """Clients per GPU that have not opted in to lend it: start-up checks would take lent bytes for used ones."""
        self.resting: dict[Place, float] = {}
        """Places that failed, and until when each is left alone (monotonic seconds)."""
        self._begun: dict[Place, int] = defaultdict(int)
        self._ended: dict[Place, int] = defaultdict(int)
        self._used: dict[GpuId, int] = {}
        self._fits: dict[GpuId, int] = {}
        """GPU → `_begun` at the last reading while nothing of ours changed."""

    def discover(self) -> None:
        """Read devices anew. Identity is the UUID, and the order is the UUIDs' own, whatever the enumeration."""
        self.devices = {d.id: d for d in sorted(self._driver.devices(), key=lambda d: d.id)}

    def find_gpu(self, text: str) -> GpuId:
        """A GPU by UUID or index; the only one, if nothing is said. Raises InvalidInput."""
        if text in self.devices:
            return GpuId(Place(text))
        by_index = {str(d.index): gpu for gpu, d in self.devices.items()}
        if text in by_index:
            return by_index[text]
        if not text and len(self.devices) == 1:
            return next(iter(self.devices))
        raise InvalidInput.of("gpu", text or "not said", f"one of {', '.join(sorted(by_index))} or a UUID of this node")

    def quiet(self) -> dict[Place, int]:
        """Places where our own memory does not change just now, for `take` after the memory was read."""
        return {p: self._begun[p] for p in self.devices if self._begun[p] == self._ended[p]}

    def take(self, memory: Mapping[Place, MemoryInfo], quiet: Mapping[Place, int]) -> None:
        """Take a reading of memory that was made after `quiet` was."""
        self.memory = memory
        for gpu in self.devices:
            info = memory.get(gpu)
            if info is None:
                self.skipped.setdefault(gpu, "its memory query gives no plausible answer")
                continue
            self.skipped.pop(gpu, None)
            if quiet.get(gpu) == self._begun[gpu]:
                self._used[gpu] = max(0, info.used - self.ours[gpu])
                self._fits[gpu] = self._begun[gpu]
                self._mapped[gpu] = 0
                self._look_for_leaks(gpu)

    def observe(self) -> None:
        """Read memory of all places, on this thread."""
        quiet = self.quiet()
        self.take(self._driver.memory(), quiet)

    @contextmanager
    def changing(self, places: Iterable[Place]) -> Iterator[None]:
        """While our own memory at these places changes on a worker thread."""
        places = set(places)
        for p in places:
            self._begun[p] += 1
        try:
            yield
        finally:
            for p in places:
                self._ended[p] += 1

    @property
    def lends(self) -> bool:
        """Whether anything of ours is on a GPU."""
        return any(self.ours.get(gpu) for gpu in self.devices)

    def held(self, place: Place, size: int) -> None:
        """We hold `size` bytes more at a place (less, below 0). Inside `changing`, when the driver has done it."""
        if place == HOST:
            return
        self.ours[place] += size
        gpu = GpuId(place)
        if size < 0 and gpu not in self.lost:
            entry = self._unseen.setdefault(gpu, Unseen(0, self._used.get(gpu, 0)))
            entry.size -= size

    def mapped(self, gpu: GpuId, size: int) -> None:
        """A share has mapped `size` bytes: in use, though readings that have begun may show them free."""
        self._mapped[gpu] += size
        self.outdate(gpu)

    def outdate(self, gpu: GpuId) -> None:
        """Readings of this GPU that have begun already are not to be gone by."""
        with self.changing({gpu}):
            pass

    def quiet_now(self, gpu: GpuId) -> bool:
        """Whether the last reading of this GPU still holds: nothing of ours has changed on it since."""
        return self._fits.get(gpu) == self._begun[gpu]

    def _look_for_leaks(self, gpu: GpuId) -> None:
        entry = self._unseen.get(gpu)
        if entry is None:
            return
        entry.size = min(entry.size, self._used[gpu] - entry.others)
        if entry.size > 0:
            self.leaked[gpu] = entry.size
        else:
            del self._unseen[gpu]
            self.leaked.pop(gpu, None)

    def rest(self, place: Place) -> None:
        """Leave a place alone for a moment, so that a failure that lasts does not become a busy loop."""
        self.resting[place] = time.monotonic() + REST

    def rested(self, now: float) -> None:
        """Forget rests that have ended."""
        self.resting = {p: end for p, end in self.resting.items() if end > now}

    def used(self, gpu: GpuId) -> int:
        """Bytes of the GPU that anybody but us uses or was promised."""
        return self._used.get(gpu, 0) + self.promised[gpu] + self._mapped[gpu]

    def free(self, gpu: GpuId) -> int:
        """Bytes that the driver shows free now."""
        info = self.memory.get(gpu)
        return 0 if info is None else info.free

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU that answers, as a possible lender."""
        found = []
        for gpu in self.devices:
            info = self.memory.get(gpu)
            if info is None:
                continue
            lends, healthy = not self.withheld[gpu], gpu not in self.unhealthy
            found.append(
                Gpu(
                    gpu,
                    info.total,
                    info.reserved,
                    self.used(gpu),
                    lends=lends and self._reaches_host(gpu),
                    healthy=healthy,
                )
            )
        return tuple(found)

    def _reaches_host(self, gpu: GpuId) -> bool:
        """Whether copies in host memory, and bytes that come back from there, would be true."""
        return (gpu, HOST) in self.paths and (HOST, gpu) in self.paths

    def counts_on(self, gpu: GpuId) -> GpuId | None:
        """With `loopback`, the name under which the policy knows clients of this GPU, so that it may lend to them."""
        return GpuId(Place(f"{gpu} (loopback)")) if self.loopback else None

    def ways(self) -> dict[tuple[Place, Place], int]:
        """The verified paths as the policy sees them."""
        found = dict(self.paths)
        for gpu in self.devices:
            if (beside := self.counts_on(gpu)) is not None:
                found |= {(s, beside): rate for (s, t), rate in self.paths.items() if t == gpu}
                found[gpu, beside] = self.rate(gpu, gpu)
        return found

    def rate(self, source: Place, target: Place) -> int:
        """Bytes per second from a place to a GPU; 0 where the pair is barred. To itself (`loopback`): the host's."""
        return self.paths.get((HOST if source == target else source, target), 0)

    def best_rate(self, gpu: GpuId) -> int:
        """Rate of the fastest verified path to this GPU."""
        return max((r for (s, t), r in self.paths.items() if t == gpu and s != HOST), default=self.rate(HOST, gpu))
