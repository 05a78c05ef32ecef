"""The plan while it is being made: the node in flat lists, and every change booked at once.

Places are small integers: the GPUs by their ids' order, then host memory, then places that leases name and the node no
longer has. Bytes that are shifted twice are booked as one way from where they were to where they end.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

from ema_core.ids import HOST, LeaseId, Place, PoolName
from ema_core.plan import Cause, Drop, Grant, Move, Overdue, Plan
from ema_core.policy.lendable import refusal, unused, whole_chunks
from ema_core.policy.standing import standing
from ema_core.state import Figures, Layout, Lease, NodeState, PoolPolicy

CLEAN, DROPPABLE, DIRTY = 0, 1, 2
"""Kinds of bytes, in the order in which they are taken: quickest for the lender first."""
KINDS = (CLEAN, DROPPABLE, DIRTY)

NEW, GONE = -1, -2
"""Where granted bytes come from and dropped bytes go to."""

Way = tuple[int, int, int, bool]
"""Lease, source, target, droppable."""


def _orphan(name: PoolName) -> PoolPolicy:
    # A lease whose pool is gone is entitled to nothing, and what it has must leave.
    return PoolPolicy(
        name=name,
        gpus=frozenset(),
        max_per_gpu={},
        headroom=0,
        hysteresis=0,
        chunk=1,
    )


@lru_cache(maxsize=64)
def layout(chunk: int, places: tuple[Place, ...]) -> Layout:
    """One and the same object for equal layouts: whether figures are for this one is then known at a glance."""
    return chunk, places


class Draft:
    """Working state of one call of `plan`. Lists with one entry per lease follow the order of `leases`: older first.

    That order decides among equals everywhere; it makes the plan independent of the order of the input.
    """

    def __init__(self, state: NodeState, pools: Sequence[PoolPolicy], now: float) -> None:
        self.now = now
        # Two sorts by one plain key each take half as long as one by pairs.
        by_id = sorted(state.leases, key=attrgetter("id"))
        self.leases: Sequence[Lease] = sorted(by_id, key=attrgetter("asked_at"))
        self.pools = sorted(pools, key=lambda pool: pool.name)
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, got {names}")
        known = set(names)
        for name in sorted(set(map(attrgetter("pool"), state.leases)) - known):
            self.pools.append(_orphan(name))
        self._read_gpus(state)
        self._read_leases()
        self._books: dict[int, dict[int, list[int]]] = {}
        self._ways: dict[Way, tuple[int, Cause]] = {}
        self._into: dict[tuple[int, int, bool], list[Way]] = {}
        self._overdue: dict[tuple[int, int], tuple[int, Cause]] = {}
        self._lenders: dict[int, list[list[int]]] = {}
        self.reclaimed: set[int] = set()
        self.gpu_share: list[int] = []
        self.share: list[int] = []
        self.kept_share: Sequence[int] = []
        self.host_droppable = [0] * len(self.pools)
        """Host bytes of each pool that no kept byte, wherever it is, can come to need; negative where too many."""

    def _read_gpus(self, state: NodeState) -> None:
        gpus = sorted(state.gpus, key=lambda gpu: gpu.id)
        self.span = n = len(gpus)
        self.host = n
        self.places: list[Place] = [*(gpu.id for gpu in gpus), HOST]
        self.index: dict[Place, int] = {place: k for k, place in enumerate(self.places)}
        if len(self.index) != n + 1:
            raise ValueError(f"gpus: ids must differ and not be {HOST!r}, got {[gpu.id for gpu in gpus]}")
        self.keep, self.grow = [0] * n, [0] * n
        self.refused: list[Cause | None] = [None] * n
        for k, gpu in enumerate(gpus):
            self.refused[k] = refusal(gpu, state.draining)
            selecting = [pool for pool in self.pools if gpu.id in pool.gpus]
            if selecting and self.refused[k] is None:
                self.keep[k], self.grow[k] = unused(gpu, selecting)
        self.pool_keep = [self._caps(pool, self.keep) for pool in self.pools]
        self.pool_grow = [self._caps(pool, self.grow) for pool in self.pools]
        self.host_drains = HOST in state.draining
        self.host_room = [
            0 if self.host_drains or not pool.spill_to_host else pool.host_spill + pool.host_lend for pool in self.pools
        ]
        self.host_lend = [0 if self.host_drains else pool.host_lend for pool in self.pools]
        # One row per own GPU: the rate from every place to it, 0 where the way is barred or is no way at all.
        self.rates: dict[Place, list[int]] = {}
        for (source, target), rate in state.paths.items():
            at = self.index.get(source)
            if at is not None and rate > 0 and source != target:
                row = self.rates.get(target)
                if row is None:
                    row = self.rates[target] = [0] * (n + 1)
                row[at] = rate

    def _caps(self, pool: PoolPolicy, rooms: list[int]) -> list[int]:
        caps = [0] * self.span
        for gpu in pool.gpus:
            k = self.index.get(gpu)
            if k is not None:
                caps[k] = whole_chunks(min(rooms[k], pool.max_per_gpu.get(gpu, 0)), pool.chunk)
        return caps

    def _read_leases(self) -> None:
        places = tuple(self.places)
        layouts = {pool.name: layout(pool.chunk, places) for pool in self.pools}
        rows = [
            known
            if (known := lease.figures) is not None and known.layout is layouts[lease.pool]
            else lease.count(layouts[lease.pool])
            for lease in self.leases
        ]
        # From one tuple of figures per lease to one tuple of leases per figure.
        columns: Any = Figures._make(zip(*rows, strict=True) if rows else [()] * len(Figures._fields))
        self.kept_wanted: tuple[int, ...] = columns.kept_wanted
        self.droppable_wanted: tuple[int, ...] = columns.droppable_wanted
        self.asked: tuple[int, ...] = columns.asked
        self.limits: tuple[int, ...] = columns.limit
        self.assured: tuple[int, ...] = columns.assured
        self.kept_held: list[int] = list(columns.kept)
        self.droppable_held: list[int] = list(columns.droppable)
        self.held: list[int] = list(columns.held)
        self.on_gpus: list[int] = list(columns.on_gpus)
        self.standing = standing(
            tuple([(pool.name, pool.chunk) for pool in self.pools]),
            columns.pool,
            columns.gpu,
            columns.weight,
            columns.priority,
        )
        self.pool_of = self.standing.pool
        self.droppable_on_host = self.standing.sums(columns.droppable_on_host)
        self.at: list[Sequence[int]] = list(zip(*columns.at, strict=True)) or [()] * len(places)
        """Bytes held at each place when the plan began, one entry per lease."""
        if any(columns.astray):
            self._find_astray([dict(each) for each in columns.astray])
        by_place = [self.standing.sums(sizes) for sizes in self.at]
        self.lent = list(map(sum, by_place))
        self.pool_lent: list[list[int]] = list(map(list, zip(*by_place, strict=True)))
        nowhere = [0] * (self.span + 1)
        self.rates_of = [self.rates.get(gpu, nowhere) for _, gpu in self.standing.groups]
        """For each group, the rate from every place."""
        self._holders: dict[int, list[int]] = {}

    def _find_astray(self, astray: list[dict[Place, int]]) -> None:
        """Give places that leases name and the node does not have a number each."""
        for place in sorted(set(chain.from_iterable(astray))):
            self.index[place] = len(self.places)
            self.places.append(place)
            self.at.append([each.get(place, 0) for each in astray])

    def barred(self) -> list[tuple[int, int]]:
        """Leases with bytes where no verified path reaches them, and the place."""
        found = []
        for members, row in zip(self.standing.by_lenders.members, self.rates_of, strict=True):
            for k, sizes in enumerate(self.at):
                if (k > self.host or not row[k]) and any(map(sizes.__getitem__, members)):
                    found += [(i, k) for i in members if sizes[i]]
        return sorted(found)

    # What is where

    def book(self, i: int) -> dict[int, list[int]]:
        """Bytes of lease `i` by place and kind, as planned so far."""
        book = self._books.get(i)
        if book is None:
            index = self.index
            book = self._books[i] = {
                index[place]: [h.clean, h.droppable, h.dirty] for place, h in self.leases[i].held.items()
            }
        return book

    def rates_to(self, i: int) -> list[int]:
        """The rate from every place to lease `i`, 0 where the way is barred."""
        return self.rates_of[self.standing.group[i]]

    def on_host(self, i: int) -> int:
        """Bytes of lease `i` in host memory, as planned so far."""
        return self.held[i] - self.on_gpus[i]

    def holders(self, k: int) -> list[int]:
        """Leases with bytes at place `k`, as planned so far or before."""
        known = self._holders.get(k)
        if known is None:
            before = self.at[k]
            known = [i for i, size in enumerate(before) if size]
            known += [i for i, book in self._books.items() if k in book and not before[i]]
            known.sort()
            self._holders[k] = known
        return known

    def last_used(self, i: int, k: int) -> float:
        """When the bytes of lease `i` at place `k` were last used."""
        holding = self.leases[i].held.get(self.places[k])
        return holding.last_used if holding is not None else self.now

    def lenders(self, i: int) -> list[list[int]]:
        """GPUs that lease `i` may borrow from, in classes of equal rate, fastest first."""
        group = self.standing.group[i]
        classes = self._lenders.get(group)
        if classes is None:
            p, gpu = self.standing.groups[group]
            caps, row, own = self.pool_grow[p], self.rates_of[group], self.index.get(gpu, -1)
            by_rate: dict[int, list[int]] = {}
            for k in range(self.span):
                if row[k] and caps[k] and k != own:
                    by_rate.setdefault(row[k], []).append(k)
            classes = self._lenders[group] = [by_rate[rate] for rate in sorted(by_rate, reverse=True)]
        return classes

    def free(self, p: int, k: int) -> int:
        """Bytes by which pool `p` may still grow on GPU `k`; negative where more is lent than growth allows."""
        return min(self.pool_grow[p][k] - self.pool_lent[p][k], self.grow[k] - self.lent[k])

    def room(self, p: int, k: int) -> int:
        """The same in whole chunks, never below 0."""
        return whole_chunks(self.free(p, k), self.pools[p].chunk)

    def any_room(self, p: int) -> bool:
        """Whether pool `p` may grow by a chunk anywhere."""
        chunk, grow, lent = self.pools[p].chunk, self.grow, self.lent
        return any(grow[k] - lent[k] >= chunk for k in range(self.span))

    def overdue_at(self, i: int, k: int) -> int:
        """Bytes of lease `i` at place `k` that are known to have nowhere to go."""
        return self._overdue.get((i, k), (0, Cause.LIMIT))[0]

    def staying(self, i: int, k: int) -> int:
        """Bytes of lease `i` at place `k` that are not known to have nowhere to go."""
        return sum(self.book(i).get(k, ())) - self.overdue_at(i, k)

    def chunks(self, i: int, size: int) -> int:
        """`size` rounded up to whole chunks of lease `i`."""
        chunk = self.pools[self.pool_of[i]].chunk
        return -(-size // chunk) * chunk

    # Changes

    def shift(  # noqa: PLR0917 - what, how much, from, to: an order nobody mistakes
        self, i: int, kind: int, size: int, source: int, target: int, cause: Cause
    ) -> None:
        """Book `size` bytes of one kind of lease `i` from `source` (or NEW) to `target` (or GONE)."""
        book, droppable = self.book(i), kind == DROPPABLE
        if source != NEW:
            book[source][kind] -= size
            self._count(i, source, -size)
        if target != GONE:
            book.setdefault(target, [0, 0, 0])[kind] += size
            self._count(i, target, size)
        if source == NEW or target == GONE:
            change = size if source == NEW else -size
            self.held[i] += change
            if droppable:
                self.droppable_held[i] += change
            else:
                self.kept_held[i] += change
        if droppable and self.host in (source, target):
            # What droppable bytes take of host memory is lent against what no kept byte needs.
            self.host_droppable[self.pool_of[i]] += size if source == self.host else -size
        left = size
        # Bytes that came earlier in this plan go on from there; dropped ones that are granted again never left.
        door = (i, GONE if source == NEW else source, droppable)
        for way in list(self._into.get(door, ())):
            if not left:
                break
            there, first = self._ways[way]
            part = min(there, left)
            left -= part
            if part == there:
                del self._ways[way]
                self._into[door].remove(way)
            else:
                self._ways[way] = (there - part, first)
            self._note((i, way[1], target, droppable), part, first)
        if left:
            self._note((i, source, target, droppable), left, cause)

    def _count(self, i: int, k: int, change: int) -> None:
        self.lent[k] += change
        self.pool_lent[self.pool_of[i]][k] += change
        if k != self.host:
            self.on_gpus[i] += change
            if change > 0:
                self._holders.pop(k, None)

    def _note(self, way: Way, size: int, cause: Cause) -> None:
        i, source, target, droppable = way
        if source == target or (source == NEW and target == GONE):
            return
        there, first = self._ways.get(way, (0, cause))
        if not there:
            self._into.setdefault((i, target, droppable), []).append(way)
        self._ways[way] = (there + size, first)

    def give_up(self, i: int, k: int, size: int, cause: Cause) -> None:
        """Book `size` bytes of lease `i` at `k` as overdue."""
        self._overdue[i, k] = (self.overdue_at(i, k) + size, self._overdue.get((i, k), (0, cause))[1])

    # The result

    def finish(self) -> Plan:
        """The plan without its queue and entitlements.

        Changes come in an order in which each finds the room that it needs.
        """
        moves: list[Move] = []
        drops: list[Drop] = []
        grants: list[Grant] = []
        places = self.places
        for (i, source, target, droppable), (size, cause) in self._ways.items():
            lease: LeaseId = self.leases[i].id
            if source == NEW:
                grants.append(Grant(lease, places[target], size, droppable))
            elif target == GONE:
                drops.append(Drop(lease, places[source], size, cause))
            else:
                moves.append(Move(lease, places[source], places[target], size, droppable, cause))
        overdue = [
            Overdue(self.leases[i].id, places[k], size, cause) for (i, k), (size, cause) in self._overdue.items()
        ]
        return Plan(moves=tuple(moves), drops=tuple(drops), grants=tuple(grants), overdue=tuple(overdue))
