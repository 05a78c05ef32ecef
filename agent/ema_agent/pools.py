"""The pools of this node: which there are, what they allow, and the terms that they set for each lease."""

from collections.abc import Iterator, Sequence

from ema_agent.lanes import Lanes
from ema_agent.lease import Lease
from ema_agent.steward import Steward
from ema_core.api import MemoryPool
from ema_core.errors import FieldError, InvalidInput
from ema_core.ids import GpuId, Place, PoolName
from ema_core.resolve import GpuFacts, resolve
from ema_driver.protocol import MemoryDriver


class Pools:
    """Pool files by name. What they mean here, the steward and the lanes are told."""

    def __init__(self, driver: MemoryDriver, steward: Steward, lanes: Lanes) -> None:
        self._driver, self._steward, self._lanes = driver, steward, lanes
        self._by_name: dict[PoolName, MemoryPool] = {}

    def __iter__(self) -> Iterator[PoolName]:
        return iter(self._by_name)

    def use(self, pools: Sequence[MemoryPool]) -> None:
        """Use these from now on. Raises InvalidInput if one cannot be on this node; then nothing changes."""
        if errors := [*self._misfits(pools), *self._changes(pools)]:
            raise InvalidInput(errors)
        facts = {gpu: GpuFacts(d.product, d.total) for gpu, d in self._steward.node.devices.items()}
        self._by_name = {PoolName(p.metadata.name): p for p in pools}
        self._steward.pools = {name: resolve(p, facts) for name, p in self._by_name.items()}
        self._lanes.caps = self._caps()
        for lease in self._steward.ledger.leases.values():
            self.set_terms(lease)
        self._steward.wake()

    def _misfits(self, pools: Sequence[MemoryPool]) -> Iterator[FieldError]:
        """Chunks that some GPU of this node cannot hold."""
        for pool in pools:
            size = pool.spec.chunk_size
            grains = (self._driver.granularity(gpu) for gpu in self._steward.node.devices)
            if grain := next((g for g in grains if size % g), 0):
                yield FieldError("spec.chunkSize", size, f"a multiple of {grain} bytes on this node")

    def _changes(self, pools: Sequence[MemoryPool]) -> Iterator[FieldError]:
        """What open leases do not allow."""
        in_use = {lease.pool for lease in self._steward.ledger.leases.values()}
        for pool in pools:
            name, size = PoolName(pool.metadata.name), pool.spec.chunk_size
            if name in in_use and (old := self.chunk(name)) != size:
                yield FieldError("spec.chunkSize", size, f"{old} while leases are open")
        for gone in in_use - {PoolName(p.metadata.name) for p in pools}:
            yield FieldError("metadata.name", gone, "to stay: leases of this pool are open")

    def _caps(self) -> dict[Place, int]:
        """The least traffic that any pool allows, by GPU."""
        caps: dict[Place, int] = {}
        for name, policy in self._steward.pools.items():
            if cap := self._by_name[name].spec.lending.max_traffic:
                caps.update({gpu: min(cap, caps.get(gpu, cap)) for gpu in policy.gpus})
        return caps

    def chunk(self, pool: PoolName) -> int:
        """Bytes of a chunk."""
        return self._by_name[pool].spec.chunk_size

    def find(self, name: str, gpu: GpuId) -> PoolName:
        """The pool of that name; without one, the first that selects the GPU. Raises InvalidInput."""
        if name:
            if name not in self._by_name:
                raise InvalidInput.of("pool", name, f"one of {', '.join(self._by_name)}")
            return PoolName(name)
        return next((n for n, p in self._steward.pools.items() if gpu in p.gpus), next(iter(self._by_name)))

    def headrooms(self) -> dict[GpuId, int]:
        """Bytes that the pools want free, by GPU: the most that any of them wants."""
        found: dict[GpuId, int] = {}
        for policy in self._steward.pools.values():
            for gpu in policy.gpus:
                found[gpu] = max(found.get(gpu, 0), policy.headroom)
        return found

    def set_terms(self, lease: Lease) -> None:
        """Limit and guaranteed amount, as its pool says."""
        spec, policy = self._by_name[lease.pool].spec, self._steward.pools[lease.pool]
        own = lease.counts_on or lease.gpu
        others = sum(size for gpu, size in policy.max_per_gpu.items() if gpu != own) + policy.host_lend
        lease.limit = others if spec.borrowing.max_per_pod is None else spec.borrowing.max_per_pod
        lease.guaranteed = min(spec.borrowing.guaranteed_per_pod, lease.limit)
