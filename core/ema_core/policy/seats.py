"""Claims beside those that they are filled with.

Filling looks at priorities, kinds and weights, never at single claims before the last step. Here claims sit in such an
order that whoever shares all three are neighbours: what they want together is the sum of a slice.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

Shared = tuple[int, tuple[int, ...]]
"""Bytes that some groups may have together, and the groups."""


class Claims:
    """Who competes, sorted out once for many fillings.

    One entry per claim, in the order that counts among equals; `chunk` has one per group.
    """

    __slots__ = ("chunk", "group", "members", "priority", "weight")

    def __init__(
        self, group: Sequence[int], weight: Sequence[int], priority: Sequence[int], chunk: Sequence[int]
    ) -> None:
        self.group, self.weight, self.priority, self.chunk = group, weight, priority, chunk
        self.members: list[list[int]] = [[] for _ in chunk]
        """The claims of each group."""
        for i, g in enumerate(group):
            self.members[g].append(i)

    def scarce(self, high: Sequence[int], shared: Sequence[Shared]) -> list[Shared]:
        """The capacities that do not suffice for everybody's `high`; the others can never bind."""
        highs = [sum(map(high.__getitem__, members)) for members in self.members]
        return [(cap, inside) for cap, inside in shared if sum([highs[g] for g in inside]) > cap]


class Cell(NamedTuple):
    """Claims of one priority, kind and weight: they sit side by side."""

    number: int
    kind: int
    weight: int
    start: int
    stop: int


class Amounts(NamedTuple):
    """Bytes of each claim, by seat, and of each cell together."""

    each: list[int]
    sums: list[int]


class Seats:
    """Claims in an order in which those that are filled together are neighbours: sums over them are sums of slices."""

    __slots__ = ("_limits", "bound", "cells", "chunk", "order", "seat", "tiers")

    def __init__(self, claims: Claims, sets: Sequence[Sequence[int]]) -> None:
        marks = [
            (chunk, tuple([u for u, inside in enumerate(sets) if g in inside])) for g, chunk in enumerate(claims.chunk)
        ]
        kinds = sorted(set(marks))
        self.chunk = [chunk for chunk, _ in kinds]
        """Of each kind."""
        self.bound = [bound for _, bound in kinds]
        """The capacities that each kind is under."""
        kind = [kinds.index(mark) for mark in marks]
        keys = [(-p, kind[g], w) for p, g, w in zip(claims.priority, claims.group, claims.weight, strict=True)]
        self.order = sorted(range(len(keys)), key=keys.__getitem__)
        """The claim on each seat. In a cell the earlier claim comes first."""
        self.seat = sorted(range(len(keys)), key=self.order.__getitem__)
        """The seat of each claim."""
        self.cells: list[Cell] = []
        self.tiers: list[list[Cell]] = []
        """The cells of each priority, highest first."""
        start = 0
        for _, tier in groupby(sorted(keys), key=lambda key: key[0]):
            first = len(self.cells)
            for (_, k, weight), members in groupby(tier):
                stop = start + len(list(members))
                self.cells.append(Cell(len(self.cells), k, weight, start, stop))
                start = stop
            self.tiers.append(self.cells[first:])
        self._limits = len(sets)

    def seated(self, amounts: Sequence[int]) -> Amounts:
        """Amounts in the claims' order, one by one on their seats."""
        return self.summed(list(map(amounts.__getitem__, self.order)))

    def summed(self, each: list[int]) -> Amounts:
        """Amounts by seat, added up."""
        return Amounts(each, [sum(each[start:stop]) for *_, start, stop in self.cells])

    def under(self, cells: list[Cell], sums: Sequence[int]) -> list[int]:
        """What these cells have together under each capacity."""
        found = [0] * self._limits
        for number, kind, *_ in cells:
            for u in self.bound[kind]:
                found[u] += sums[number]
        return found


@lru_cache(maxsize=16)
def seats_for(claims: Claims, sets: tuple[tuple[int, ...], ...]) -> Seats:
    """The seats for capacities that these sets of groups have together. Which ones are scarce changes seldom."""
    return Seats(claims, sets)
