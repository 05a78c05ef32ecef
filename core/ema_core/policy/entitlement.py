"""Weighted max-min with floors, ceilings and shared capacities, in whole chunks, exactly.

The rule: chunks are handed out one by one. The k-th chunk of a claim has the key k * chunk / weight; the chunk with the
smallest key is next, the older and then the smaller name first among equals. A chunk that no longer fits closes its
group for good, because capacity only shrinks. On a polymatroid this greedy order *is* weighted max-min (the
lexicographically best vector), and it leaves no question about remainders.

What runs does not hand out chunks one by one. It jumps to the highest common level at which everything still fits and
hands out only the last, partial level singly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm


@dataclass(frozen=True, slots=True)
class Claims:
    """Who competes. The lists have one entry per claim, `chunk` one per group."""

    group: Sequence[int]
    weight: Sequence[int]
    priority: Sequence[int]
    chunk: Sequence[int]
    tie: Callable[[int], tuple[float, str]]
    """Order among equals."""


Shared = tuple[int, tuple[int, ...]]
"""Bytes that some groups may have together, and the groups."""


def shares(claims: Claims, low: Sequence[int], high: Sequence[int], shared: Sequence[Shared]) -> list[int]:
    """Bytes for each claim, between `low` and `high`: by priority, and weighted max-min among equals.

    `low` must fit; every amount is a multiple of its group's chunk. O(n log n) beside one search per group that closes.
    """
    groups = len(claims.chunk)
    lows, highs = [0] * groups, [0] * groups
    for g, lo, hi in zip(claims.group, low, high, strict=True):
        lows[g] += lo
        highs[g] += hi
    scarce = [(cap, members) for cap, members in shared if sum([highs[g] for g in members]) > cap]
    if not scarce:
        return list(high)
    got = list(high)
    slack = [cap - sum([lows[g] for g in members]) for cap, members in scarce]
    bound: list[list[int]] = [[] for _ in range(groups)]
    for u, (_, members) in enumerate(scarce):
        for g in members:
            bound[g].append(u)
    tiers: dict[int, list[int]] = {}
    for i, g in enumerate(claims.group):
        if bound[g] and low[i] < high[i]:
            tiers.setdefault(claims.priority[i], []).append(i)
    for priority in sorted(tiers, reverse=True):
        _Tier(claims, low=low, high=high, bound=bound, slack=slack, members=tiers[priority]).fill(got)
    return got


class _Ladder:
    """Claims of one weight and chunk size: what they have together at a level."""

    __slots__ = ("_high_sum", "_highs", "_low_sum", "_lows", "step", "weight")

    def __init__(self, weight: int, step: int, lows: list[int], highs: list[int]) -> None:
        self.weight, self.step = weight, step
        self._lows, self._highs = sorted(lows), sorted(highs)
        self._low_sum = [0, *accumulate(self._lows)]
        self._high_sum = [0, *accumulate(self._highs)]

    def total(self, level: int) -> int:
        """Sum of min(high, max(low, level))."""
        full, floor = bisect_right(self._highs, level), bisect_left(self._lows, level)
        at_level = floor - full
        return self._high_sum[full] + self._low_sum[-1] - self._low_sum[floor] + level * at_level


class _Tier:
    """Claims of one priority, filled together."""

    __slots__ = ("_bound", "_chunk", "_claims", "_grain", "_heaviest", "_high", "_low", "_open", "_slack")

    def __init__(
        self,
        claims: Claims,
        *,
        low: Sequence[int],
        high: Sequence[int],
        bound: list[list[int]],
        slack: list[int],
        members: list[int],
    ) -> None:
        self._claims, self._low, self._high, self._bound, self._slack = claims, low, high, bound, slack
        self._chunk = claims.chunk
        self._open: dict[int, list[int]] = {}
        group = claims.group
        for i in members:
            self._open.setdefault(group[i], []).append(i)
        # A rung raises the heaviest claim of the smallest chunk by one chunk, and no claim by more than one.
        self._heaviest = max([claims.weight[i] for i in members])
        self._grain = min([claims.chunk[g] for g in self._open])

    def _level(self, rung: int, weight: int, chunk: int) -> int:
        return rung * self._grain * weight // (self._heaviest * chunk) * chunk

    def fill(self, got: list[int]) -> None:
        """Write the tier's amounts into `got` and take them off the slack."""
        for g in list(self._open):
            if min([self._slack[u] for u in self._bound[g]]) < self._chunk[g]:
                for i in self._open.pop(g):
                    got[i] = self._low[i]
        rung = 0
        while self._open:
            rung = self._highest_rung(rung)
            if rung < 0:
                for g in list(self._open):
                    self._close(g, self._high, got)
                return
            self._last_level(rung, got)
            rung += 1

    def _highest_rung(self, rung: int) -> int:
        """The highest rung from `rung` on at which all fits, or -1 if everybody can have all."""
        low, high = self._low, self._high
        need = {g: sum([high[i] - low[i] for i in members]) for g, members in self._open.items()}
        asked: dict[int, int] = {}
        for g, size in need.items():
            for u in self._bound[g]:
                asked[u] = asked.get(u, 0) + size
        top = -1
        # The most overdrawn capacity first: it mostly sets the rung, and the others then need only one look.
        for u in sorted(asked, key=lambda u: (self._slack[u] - asked[u], u)):
            if asked[u] <= self._slack[u]:
                break
            top = self._search(u, rung, top)
        return top

    def _search(self, u: int, rung: int, top: int) -> int:
        """The highest rung in [rung, top] at which capacity `u` suffices; `rung` itself is known to fit."""
        weight, low, high = self._claims.weight, self._low, self._high
        sets: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        spare = self._slack[u]
        for g, members in self._open.items():
            if u in self._bound[g]:
                for i in members:
                    lows, highs = sets.setdefault((weight[i], self._chunk[g]), ([], []))
                    lows.append(low[i])
                    highs.append(high[i])
                    spare += low[i]
        ladders = [_Ladder(w, chunk, lows, highs) for (w, chunk), (lows, highs) in sets.items()]

        def fits(at: int) -> bool:
            return sum([each.total(self._level(at, each.weight, each.step)) for each in ladders]) <= spare

        if top < 0:
            top = max([-(-max(highs) * self._heaviest // (w * self._grain)) for (w, _), (_, highs) in sets.items()])
        elif fits(top):
            return top
        while rung < top:
            middle = (rung + top + 1) // 2
            if fits(middle):
                rung = middle
            else:
                top = middle - 1
        return rung

    def _close(self, g: int, amounts: Sequence[int], got: list[int]) -> None:
        taken = 0
        for i in self._open.pop(g):
            got[i] = amounts[i]
            taken += amounts[i] - self._low[i]
        for u in self._bound[g]:
            self._slack[u] -= taken

    def _last_level(self, rung: int, got: list[int]) -> None:
        """Hand out the chunks between `rung` and the next one singly; close the groups where one does not fit."""
        weight, low, high = self._claims.weight, self._low, self._high
        spare = list(self._slack)
        asked: dict[int, int] = {}
        last: list[int] = []
        for g, members in self._open.items():
            chunk, used, more = self._chunk[g], 0, 0
            for i in members:
                level = self._level(rung, weight[i], chunk)
                amount = min(high[i], max(low[i], level))
                got[i] = amount
                used += amount - low[i]
                if amount < high[i] and amount < self._level(rung + 1, weight[i], chunk):
                    last.append(i)
                    more += chunk
            for u in self._bound[g]:
                spare[u] -= used
                asked[u] = asked.get(u, 0) + more
        critical = {g: [u for u in self._bound[g] if asked[u] > spare[u]] for g in self._open}
        group = self._claims.group
        single: list[int] = []
        for i in last:
            if critical[group[i]]:
                single.append(i)
            else:
                got[i] += self._chunk[group[i]]
        for g in self._hand_out(single, critical, spare, got):
            self._close(g, got, got)

    def _hand_out(
        self, single: list[int], critical: dict[int, list[int]], spare: list[int], got: list[int]
    ) -> set[int]:
        """One chunk for each of `single` in the order of their keys; returns the groups where one did not fit."""
        group, weight, tie = self._claims.group, self._claims.weight, self._claims.tie
        common = lcm(*{weight[i] for i in single})
        single.sort(key=lambda i: ((got[i] + self._chunk[group[i]]) * (common // weight[i]), tie(i)))
        closed: set[int] = set()
        for i in single:
            g = group[i]
            if g in closed:
                continue
            chunk = self._chunk[g]
            if all(spare[u] >= chunk for u in critical[g]):
                got[i] += chunk
                for u in critical[g]:
                    spare[u] -= chunk
            else:
                closed.add(g)
        return closed
