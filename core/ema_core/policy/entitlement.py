"""Weighted max-min with floors, ceilings and shared capacities, in whole chunks, exactly.

The rule: chunks are handed out one by one. The k-th chunk of a claim has the key k * chunk / weight; the chunk with the
smallest key is next, the earlier claim (the older, then the smaller name) first among equals. A chunk that no longer
fits closes its group for good, because capacity only shrinks. On a polymatroid this greedy order *is* weighted max-min
(the lexicographically best vector), and it leaves no question about remainders.

What runs does not hand out chunks one by one. It jumps to the highest common level at which everything still fits and
hands out only the last, partial level singly. Groups with one size of chunk under the same capacities are of one
*kind*: what does not fit for one of them fits for none, so that all their claims are looked at together.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, count
from math import lcm
from operator import le, sub
from typing import NamedTuple

from ema_core.policy.seats import Amounts, Cell, Claims, Seats, Shared, seats_for


def fill(
    claims: Claims, low: Sequence[int], assured: Sequence[int], high: Sequence[int], shared: Sequence[Shared]
) -> list[int]:
    """Bytes for each claim, between `low` and `high`: first up to what is assured, then the rest.

    Both by priority, and weighted max-min among equals. `low` must fit; every amount is a multiple of its group's
    chunk. O(n log n) beside one search per kind that closes.
    """
    scarce = claims.scarce(high, shared)
    if not scarce:
        return list(high)
    seats, caps = seats_for(claims, tuple([inside for _, inside in scarce])), [cap for cap, _ in scarce]
    floor = list(low)
    for i, size in enumerate(assured):
        if size > low[i]:
            floor[i] = max(low[i], min(size, high[i]))
    bottom = seats.seated(floor)
    if not all(map(le, seats.under(seats.cells, bottom.sums), caps)):
        bottom = seats.summed(_shares(seats, seats.seated(low), bottom, caps))
    got = _shares(seats, bottom, seats.seated(high), caps)
    return list(map(got.__getitem__, seats.seat))


def _shares(seats: Seats, low: Amounts, high: Amounts, caps: list[int]) -> list[int]:
    """Amounts between `low` and `high` by seat, highest priority first."""
    got = list(high.each)
    slack = list(map(sub, caps, seats.under(seats.cells, low.sums)))
    needs = list(map(sub, high.sums, low.sums))
    for cells in seats.tiers:
        rest = list(map(sub, slack, seats.under(cells, needs)))
        if min(rest) >= 0:
            # `got` began with everybody's `high`.
            slack = rest
            continue
        tier = _Tier(seats, low, high, slack)
        for cell in cells:
            if needs[cell.number] and seats.bound[cell.kind]:
                tier.enter(cell, got)
        tier.fill(got)
    return got


class _Rung(NamedTuple):
    """A cell that takes part: `low` and `high` of its claims, and their sums."""

    kind: int
    weight: int
    step: int
    """Chunk size."""
    start: int
    lows: list[int]
    highs: list[int]
    floor: int
    ceiling: int


_Last = tuple[_Rung, int, list[int], list[int]]
"""Claims, their level, their amounts at it, and the seats of those that get one chunk more."""


class _Ladder:
    """Claims of one weight and chunk size, whatever their kind: what they have together at a level."""

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

    __slots__ = ("_bound", "_grain", "_heaviest", "_high", "_low", "_open", "_seats", "_slack")

    def __init__(self, seats: Seats, low: Amounts, high: Amounts, slack: list[int]) -> None:
        self._seats, self._low, self._high, self._bound, self._slack = seats, low, high, seats.bound, slack
        self._open: dict[int, list[_Rung]] = {}
        # One step raises the heaviest claim of the smallest chunk by one chunk, and no claim by more than one.
        self._heaviest = self._grain = 1

    def enter(self, cell: Cell, got: list[int]) -> None:
        """Let claims take part; they have `low` where their kind has no room left."""
        number, kind, weight, start, stop = cell
        chunk, lows = self._seats.chunk[kind], self._low.each[start:stop]
        if min([self._slack[u] for u in self._bound[kind]]) < chunk:
            got[start:stop] = lows
            return
        floor, ceiling = self._low.sums[number], self._high.sums[number]
        rung = _Rung(kind, weight, chunk, start, lows, self._high.each[start:stop], floor, ceiling)
        self._open.setdefault(kind, []).append(rung)

    def fill(self, got: list[int]) -> None:
        """Write the tier's amounts into `got` and take them off the slack."""
        self._heaviest = max([rung.weight for rungs in self._open.values() for rung in rungs], default=1)
        self._grain = min([self._seats.chunk[kind] for kind in self._open], default=1)
        step = 0
        while self._open:
            step = self._highest_step(step)
            if step < 0:
                # `got` began with everybody's `high`.
                for kind, rungs in self._open.items():
                    for u in self._bound[kind]:
                        self._slack[u] -= sum([rung.ceiling - rung.floor for rung in rungs])
                return
            self._last_step(step, got)
            step += 1

    def _level(self, step: int, rung: _Rung | _Ladder) -> int:
        return step * self._grain * rung.weight // (self._heaviest * rung.step) * rung.step

    def _highest_step(self, step: int) -> int:
        """The highest step from `step` on at which all fits, or -1 if everybody can have all."""
        asked: dict[int, int] = {}
        for kind, rungs in self._open.items():
            need = sum([rung.ceiling - rung.floor for rung in rungs])
            for u in self._bound[kind]:
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
        alike: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for kind, rungs in self._open.items():
            if u in self._bound[kind]:
                for rung in rungs:
                    lows, highs = alike.setdefault((rung.weight, rung.step), ([], []))
                    lows += rung.lows
                    highs += rung.highs
        return [_Ladder(weight, step, lows, highs) for (weight, step), (lows, highs) in alike.items()]

    def _last_step(self, step: int, got: list[int]) -> None:
        """Hand out the chunks between `step` and the next one singly; close the kinds where one does not fit."""
        spare, asked = list(self._slack), [0] * len(self._slack)
        last: dict[int, list[_Last]] = {}
        for kind, rungs in self._open.items():
            used = more = 0
            last[kind] = []
            for rung in rungs:
                level = self._level(step, rung)
                amounts = [
                    level if low <= level <= high else high if high < level else low
                    for low, high in zip(rung.lows, rung.highs, strict=True)
                ]
                raised = []
                if self._level(step + 1, rung) > level:
                    spans = zip(rung.lows, rung.highs, count(rung.start))
                    raised = [k for low, high, k in spans if low <= level < high]
                last[kind].append((rung, level, amounts, raised))
                used += sum(amounts) - rung.floor
                more += rung.step * len(raised)
            for u in self._bound[kind]:
                spare[u] -= used
                asked[u] += more
        critical = {kind: [u for u in self._bound[kind] if asked[u] > spare[u]] for kind in self._open}
        for kind in self._hand_out(last, critical, spare):
            taken = 0
            for rung, _, amounts, raised in last[kind]:
                got[rung.start : rung.start + len(amounts)] = amounts
                for k in raised:
                    got[k] += rung.step
                taken += sum(amounts) - rung.floor + rung.step * len(raised)
            for u in self._bound[kind]:
                self._slack[u] -= taken
            del self._open[kind]

    def _hand_out(self, last: dict[int, list[_Last]], critical: dict[int, list[int]], spare: list[int]) -> list[int]:
        """Leave in `last` only the chunks that fit, in the order of their keys; returns the kinds that close."""
        contested = [each for kind, rungs in last.items() if critical[kind] for each in rungs if each[3]]
        common = lcm(*{rung.weight for rung, *_ in contested})
        by_key: dict[int, list[tuple[_Rung, list[int]]]] = {}
        for rung, level, _, raised in contested:
            by_key.setdefault((level + rung.step) * (common // rung.weight), []).append((rung, raised))
        closed: set[int] = set()
        for _, equals in sorted(by_key.items()):
            for rung, raised in equals:
                if rung.kind in closed:
                    raised.clear()
            if len({rung.kind for rung, _ in equals}) == 1:
                closed |= self._cut(equals, critical[equals[0][0].kind], spare)
            else:
                closed |= self._deal(equals, critical, spare)
        return sorted(closed)

    def _cut(self, equals: list[tuple[_Rung, list[int]]], limits: list[int], spare: list[int]) -> set[int]:
        """Chunks of one key and one kind: the earliest so many fit. Returns the kind if it closes."""
        order, (rung, _) = self._seats.order, equals[0]
        fit, asked = min([spare[u] for u in limits]) // rung.step, sum([len(raised) for _, raised in equals])
        for u in limits:
            spare[u] -= rung.step * min(fit, asked)
        if fit >= asked:
            return set()
        first_out = sorted([order[k] for _, raised in equals for k in raised])[fit]
        for _, raised in equals:
            raised[:] = [k for k in raised if order[k] < first_out]
        return {rung.kind}

    def _deal(
        self, equals: list[tuple[_Rung, list[int]]], critical: dict[int, list[int]], spare: list[int]
    ) -> set[int]:
        """Chunks of one key and several kinds, one by one, the earlier claim first. Returns the kinds that close."""
        order, closed = self._seats.order, set()
        queue = sorted([(order[k], k, n) for n, (_, raised) in enumerate(equals) for k in raised])
        for _, raised in equals:
            raised.clear()
        for _, k, n in queue:
            rung, raised = equals[n]
            if rung.kind in closed:
                continue
            if min([spare[u] for u in critical[rung.kind]]) >= rung.step:
                raised.append(k)
                for u in critical[rung.kind]:
                    spare[u] -= rung.step
            else:
                closed.add(rung.kind)
        return closed
