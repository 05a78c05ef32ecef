"""A node in virtual time: the policy decides, here its decisions happen at once and their copies take their time."""

from collections.abc import Iterator
from dataclasses import replace

from ema_cli.serving.outcome import Traffic
from ema_cli.serving.presets import GpuSpec, Model
from ema_cli.serving.step import Demand, Memory, Path
from ema_core.ids import HOST, GpuId, LeaseId, Place
from ema_core.plan import Cause, Move, Plan
from ema_core.policy import apply, plan
from ema_core.state import Gpu, Holding, Lease, NodeState, PoolPolicy


def gpu_id(index: int) -> GpuId:
    """The virtual GPU's UUID."""
    return GpuId(Place(f"GPU-{index}"))


class Node:
    """Equal GPUs with one instance each, of which each may lend and borrow.

    Lent bytes are taken as dirty, so that a reclaim always costs a copy: over `link` to another lender, over PCIe to
    host memory.
    """

    def __init__(
        self,
        *,
        gpus: int,
        spec: GpuSpec,
        model: Model,
        share: int,
        link: int,
        pool: PoolPolicy,
        limit: int,
        max_traffic: int | None,
    ) -> None:
        self.traffic = Traffic()
        self._spec, self._share, self._link, self._pool = spec, share, link, pool
        self._lender_rate = min(link, max_traffic or link)
        self._weights = model.weights
        self._ids = [gpu_id(index) for index in range(gpus)]
        self._own = [0] * gpus
        self._leases = {
            gpu: Lease(LeaseId(f"lease-{index}"), pool.name, gpu, limit=limit) for index, gpu in enumerate(self._ids)
        }
        self._paths: dict[tuple[Place, Place], int] = {
            (one, other): link for one in self._ids for other in self._ids if one != other
        }
        for gpu in self._ids:
            self._paths[HOST, gpu] = self._paths[gpu, HOST] = spec.pcie
        self._lent: dict[Place, int] = dict.fromkeys(self._ids, 0)
        self._leaving: list[list[tuple[float, int]]] = [[] for _ in range(gpus)]

    def lent(self, index: int) -> int:
        """Bytes of this GPU that others hold."""
        return self._lent[self._ids[index]]

    def granted(self, index: int) -> int:
        """Bytes that the instance on this GPU holds elsewhere."""
        return self._leases[self._ids[index]].held_total

    def memory(self, index: int, now: float) -> Memory:
        """What the instance on this GPU has now."""
        leaving = self._leaving[index]
        while leaving and leaving[0][0] <= now:
            leaving.pop(0)
        local = self._share - self.lent(index) - sum(size for _, size in leaving)
        held = self._leases[self._ids[index]].held
        near = sum(holding.total for place, holding in held.items() if place != HOST)
        paths = []
        if near:
            # All borrowers of a lender fetch in every step: the lender's side takes as long as all it lends.
            slowest = max(self._lent[place] for place in held if place != HOST) / self._lender_rate
            paths.append(Path(near, near / max(near / self._link, slowest)))
        if HOST in held:
            paths.append(Path(held[HOST].total, self._spec.pcie))
        return Memory(min(self._own[index], max(0, local)), tuple(paths))

    def local_ready(self, index: int) -> float | None:
        """When memory that is just being taken back will be there, or None."""
        return self._leaving[index][0][0] if self._leaving[index] else None

    def want(self, index: int, demand: Demand, now: float) -> bool:
        """Tell what the instance could use; bytes it can use no more go back. Whether others may have got any."""
        chunk = self._pool.chunk
        gpu = self._ids[index]
        lease = self._leases[gpu]
        own = min(self._share, -(-demand.local // chunk) * chunk)
        kept = min(lease.limit, -(-demand.borrowed // chunk) * chunk)
        if own == self._own[index] and kept == lease.kept:
            return False
        gives_back = own < self._own[index] or kept < lease.kept
        self._own[index] = own
        asked_at = now if kept > lease.held_total >= lease.kept else lease.asked_at
        self._leases[gpu] = replace(lease, kept=kept, asked_at=asked_at, held=dict(self._shrunk(lease, kept)))
        self._count_lent()
        # What is given back matters to the policy only while somebody waits for it.
        if gives_back and not any(other.held_total < other.kept for other in self._leases.values()):
            return True
        return self._replan(now) or gives_back

    @staticmethod
    def _shrunk(lease: Lease, kept: int) -> Iterator[tuple[Place, Holding]]:
        """Holdings without what is beyond `kept`; host memory goes back first, it is the slowest."""
        excess = lease.held_total - kept
        for place in sorted(lease.held, key=lambda place: (place != HOST, place)):
            holding = lease.held[place]
            given = max(0, min(excess, holding.total))
            excess -= given
            if given < holding.total:
                clean = min(holding.clean, holding.total - given)
                yield place, replace(holding, clean=clean, dirty=holding.total - given - clean)

    def _replan(self, now: float) -> bool:
        state = NodeState(
            gpus=tuple(
                Gpu(gpu, self._spec.memory, self._spec.reserved, self._weights + own)
                for gpu, own in zip(self._ids, self._own, strict=True)
            ),
            paths=self._paths,
            leases=tuple(lease for lease in self._leases.values() if lease.kept or lease.held),
        )
        decided = plan(state, (self._pool,), now)
        self.traffic.plans += 1
        if decided.empty:
            return False
        for lease in apply(state, decided, now).leases:
            self._leases[lease.gpu] = lease
        self._count_lent()
        self._copy(decided, now)
        return True

    def _count_lent(self) -> None:
        self._lent = dict.fromkeys(self._ids, 0)
        for lease in self._leases.values():
            for place, holding in lease.held.items():
                self._lent[place] = self._lent.get(place, 0) + holding.total

    def _copy(self, decided: Plan, now: float) -> None:
        taken: dict[Place, float] = {}
        for move in decided.moves:
            seconds = move.size / self._rate(move)
            self.traffic.moved += move.size
            if move.source != HOST:
                # Bytes leave one lender one after the other; other lenders' copies run beside them.
                taken[move.source] = taken.get(move.source, 0.0) + seconds
                leaving = self._leaving[self._ids.index(GpuId(move.source))]
                leaving.append((now + taken[move.source], move.size))
                leaving.sort()
        reclaimed = {move.source for move in decided.moves if move.cause is Cause.HEADROOM}
        self.traffic.reclaims += [taken[place] for place in sorted(reclaimed)]

    def _rate(self, move: Move) -> int:
        return self._spec.pcie if HOST in {move.source, move.target} else self._link
