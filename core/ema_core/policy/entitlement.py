"""Weighted max-min with floors, ceilings and shared capacities, in whole chunks, exactly.

The rule: chunks are handed out one by one. The k-th chunk of a claim has the key k * chunk / weight; the chunk with the
smallest key is next, the earlier claim (the older, then the smaller name) first among equals. A chunk that no longer
fits closes its group for good, because capacity only shrinks. On a polymatroid this greedy order *is* weighted max-min
(the lexicographically best vector), and it leaves no question about remainders.

What runs does not hand out chunks one by one. It jumps to the highest common level at which everything still fits and
hands out only the last, partial level singly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import lcm
from typing import NamedTuple

Cell = tuple[int, int, list[int]]
"""A group, a weight, and the claims that have both."""

Shared = tuple[int, tuple[int, ...]]
"""Bytes that some groups may have together, and the groups."""


class Claims:
    """Who competes, sorted out once for several fillings.

    One entry per claim, in the order that counts among equals; `chunk` has one per group.
    """

    __slots__ = ("_priority", "_tiers", "_weight", "chunk", "group")

    def __init__(
        self, group: Sequence[int], weight: Sequence[int], priority: Sequence[int], chunk: Sequence[int]
    ) -> None:
        self.group, self.chunk = group, chunk
        self._weight, self._priority = weight, priority
        self._tiers: list[list[Cell]] = []

    def tiers(self) -> list[list[Cell]]:
        """The cells of each priority, highest first."""
        if not self._tiers:
            found: dict[tuple[int, int, int], list[int]] = {}
            for i, key in enumerate(zip(self._priority, self.group, self._weight, strict=True)):
                if key in found:
                    found[key].append(i)
                else:
                    found[key] = [i]
            tiers: dict[int, list[Cell]] = {p: [] for p in sorted(set(self._priority), reverse=True)}
            for (p, g, w), members in found.items():
                tiers[p].append((g, w, members))
            self._tiers = list(tiers.values())
        return self._tiers

    def sums(self, amounts: Sequence[int]) -> list[int]:
        """Bytes of each group."""
        sums = [0] * len(self.chunk)
        for g, amount in zip(self.group, amounts, strict=True):
            sums[g] += amount
        return sums

    def scarce(self, high: Sequence[int], shared: Sequence[Shared]) -> list[Shared]:
        """The capacities that do not suffice for everybody's `high`; the others can never bind."""
        highs = self.sums(high)
        return [(cap, inside) for cap, inside in shared if sum([highs[g] for g in inside]) > cap]


def shares(claims: Claims, low: Sequence[int], high: Sequence[int], shared: Sequence[Shared]) -> list[int]:
    """Bytes for each claim, between `low` and `high`: by priority, and weighted max-min among equals.

    `low` must fit; every amount is a multiple of its group's chunk. O(n log n) beside one search per group that closes.
    """
    scarce = claims.scarce(high, shared)
    if not scarce:
        return list(high)
    groups, lows = len(claims.chunk), claims.sums(low)
    got = list(high)
    slack = [cap - sum([lows[g] for g in inside]) for cap, inside in scarce]
    bound: list[list[int]] = [[] for _ in range(groups)]
    for u, (_, inside) in enumerate(scarce):
        for g in inside:
            bound[g].append(u)
    for cells in claims.tiers():
        need = _need(cells, low, high, groups)
        rest = [left - sum([need[g] for g in inside]) for left, (_, inside) in zip(slack, scarce, strict=True)]
        if min(rest) >= 0:
            # `got` began with everybody's `high`.
            slack = rest
            continue
        tier = _Tier(claims, low, high, bound=bound, slack=slack)
        for g, weight, members in cells:
            if need[g] and bound[g]:
                tier.enter(g, weight, members, got)
        tier.fill(got)
    return got


def _need(cells: list[Cell], low: Sequence[int], high: Sequence[int], groups: int) -> list[int]:
    need = [0] * groups
    for g, _, members in cells:
        for i in members:
            need[g] += high[i] - low[i]
    return need


class _Rung(NamedTuple):
    """Claims of one priority, group and weight, and the sums of their `low` and `high`."""

    group: int
    weight: int
    step: int
    """Chunk size."""
    members: list[int]
    floor: int
    ceiling: int


_Last = tuple[_Rung, int, list[int], list[int]]
"""Claims, their level, their amounts at it, and those that get one chunk more."""


class _Ladder:
    """Claims of one weight and chunk size, whatever their group: what they have together at a level."""

    __slots__ = ("_high_sum", "_highs", "_low_sum", "_lows", "step", "top", "weight")

    def __init__(self, weight: int, step: int, lows: list[int], highs: list[int]) -> None:
        self.weight, self.step = weight, step
        self._lows, self._highs = sorted(lows), sorted(highs)
        self._low_sum, self._high_sum = [0, *accumulate(self._lows)], [0, *accumulate(self._highs)]
        self.top = self._highs[-1]

    def total(self, level: int) -> int:
        """Sum of min(high, max(low, level)), less the sum of low."""
        full, floor = bisect_right(self._highs, level), bisect_left(self._lows, level)
        return self._high_sum[full] - self._low_sum[floor] + level * (floor - full)


class _Tier:
    """Claims of one priority, filled together."""

    __slots__ = ("_bound", "_claims", "_grain", "_heaviest", "_high", "_low", "_open", "_slack")

    def __init__(
        self, claims: Claims, low: Sequence[int], high: Sequence[int], *, bound: list[list[int]], slack: list[int]
    ) -> None:
        self._claims, self._low, self._high, self._bound, self._slack = claims, low, high, bound, slack
        self._open: dict[int, list[_Rung]] = {}
        # One step raises the heaviest claim of the smallest chunk by one chunk, and no claim by more than one.
        self._heaviest = self._grain = 1

    def enter(self, group: int, weight: int, members: list[int], got: list[int]) -> None:
        """Let claims take part; they have `low` where their group has no room left."""
        low, high, chunk = self._low, self._high, self._claims.chunk[group]
        if min([self._slack[u] for u in self._bound[group]]) < chunk:
            for i in members:
                got[i] = low[i]
            return
        floor, ceiling = sum([low[i] for i in members]), sum([high[i] for i in members])
        if floor < ceiling:
            self._open.setdefault(group, []).append(_Rung(group, weight, chunk, members, floor, ceiling))

    def fill(self, got: list[int]) -> None:
        """Write the tier's amounts into `got` and take them off the slack."""
        self._heaviest = max([rung.weight for rungs in self._open.values() for rung in rungs], default=1)
        self._grain = min([self._claims.chunk[g] for g in self._open], default=1)
        step = 0
        while self._open:
            step = self._highest_step(step)
            if step < 0:
                # `got` began with everybody's `high`.
                for g, rungs in self._open.items():
                    for u in self._bound[g]:
                        self._slack[u] -= sum([rung.ceiling - rung.floor for rung in rungs])
                return
            self._last_step(step, got)
            step += 1

    def _level(self, step: int, rung: _Rung | _Ladder) -> int:
        return step * self._grain * rung.weight // (self._heaviest * rung.step) * rung.step

    def _highest_step(self, step: int) -> int:
        """The highest step from `step` on at which all fits, or -1 if everybody can have all."""
        asked: dict[int, int] = {}
        for g, rungs in self._open.items():
            need = sum([rung.ceiling - rung.floor for rung in rungs])
            for u in self._bound[g]:
                asked[u] = asked.get(u, 0) + need
        top = -1
        # The most overdrawn capacity first: it mostly sets the level, and the others then need only one look.
        for u in sorted(asked, key=lambda u: (self._slack[u] - asked[u], u)):
            if asked[u] <= self._slack[u]:
                break
            top = self._search(u, step, top)
        return top

    def _search(self, u: int, step: int, top: int) -> int:
        """The highest step in [step, top] at which capacity `u` suffices; `step` itself is known to fit."""
        ladders = self._ladders(u)
        spare, level = self._slack[u], self._level
        if top < 0:
            top = max([-(-each.top * self._heaviest // (each.weight * self._grain)) for each in ladders])
        elif sum([each.total(level(top, each)) for each in ladders]) <= spare:
            return top
        while step < top:
            middle = (step + top + 1) // 2
            if sum([each.total(level(middle, each)) for each in ladders]) <= spare:
                step = middle
            else:
                top = middle - 1
        return step

    def _ladders(self, u: int) -> list[_Ladder]:
        """The open claims under capacity `u`."""
        alike: dict[tuple[int, int], list[int]] = {}
        for g, rungs in self._open.items():
            if u in self._bound[g]:
                for rung in rungs:
                    alike.setdefault((rung.weight, rung.step), []).extend(rung.members)
        low, high = self._low, self._high
        return [
            _Ladder(weight, step, [low[i] for i in members], [high[i] for i in members])
            for (weight, step), members in alike.items()
        ]

    def _last_step(self, step: int, got: list[int]) -> None:
        """Hand out the chunks between `step` and the next one singly; close the groups where one does not fit."""
        spare, asked = list(self._slack), [0] * len(self._slack)
        last: dict[int, list[_Last]] = {}
        low, high = self._low, self._high
        for g, rungs in self._open.items():
            used = more = 0
            last[g] = []
            for rung in rungs:
                level = self._level(step, rung)
                amounts = [
                    level if low[i] <= level <= high[i] else high[i] if high[i] < level else low[i]
                    for i in rung.members
                ]
                above = self._level(step + 1, rung) > level
                raised = [i for i in rung.members if low[i] <= level < high[i]] if above else []
                last[g].append((rung, level, amounts, raised))
                used += sum(amounts) - rung.floor
                more += rung.step * len(raised)
            for u in self._bound[g]:
                spare[u] -= used
                asked[u] += more
        critical = {g: [u for u in self._bound[g] if asked[u] > spare[u]] for g in self._open}
        for g in self._hand_out(last, critical, spare):
            taken = 0
            for rung, _, amounts, raised in last[g]:
                for i, amount in zip(rung.members, amounts, strict=True):
                    got[i] = amount
                for i in raised:
                    got[i] += rung.step
                taken += sum(amounts) - rung.floor + rung.step * len(raised)
            for u in self._bound[g]:
                self._slack[u] -= taken
            del self._open[g]

    def _hand_out(self, last: dict[int, list[_Last]], critical: dict[int, list[int]], spare: list[int]) -> list[int]:
        """Leave in `last` only the chunks that fit, in the order of their keys; returns the groups that close."""
        contested = [each for g, rungs in last.items() if critical[g] for each in rungs if each[3]]
        common = lcm(*{rung.weight for rung, *_ in contested})
        queue = []
        for n, (rung, level, _, raised) in enumerate(contested):
            key = (level + rung.step) * (common // rung.weight)
            queue += [(key, i, n) for i in raised]
            raised.clear()
        queue.sort()
        limits = {u for rung, *_ in contested for u in critical[rung.group]}
        if len(limits) == 1 and len({rung.step for rung, *_ in contested}) == 1:
            # One capacity, one size: the first so many get theirs.
            fit = spare[limits.pop()] // contested[0][0].step
            for _, i, n in queue[:fit]:
                contested[n][3].append(i)
            return list({contested[n][0].group: None for *_, n in queue[fit:]})
        closed: dict[int, None] = {}
        for _, i, n in queue:
            rung, _, _, raised = contested[n]
            g = rung.group
            if g in closed:
                continue
            room = min([spare[u] for u in critical[g]])
            if room >= rung.step:
                raised.append(i)
                for u in critical[g]:
                    spare[u] -= rung.step
            else:
                closed[g] = None
                if len(closed) == len(critical):
                    break
        return list(closed)
