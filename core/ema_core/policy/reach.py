"""Which sets of borrowers compete for which sets of lenders.

Borrowers with the same pool and the same own GPU reach the same lenders: they are one *group*. Amounts per group can be
served exactly when, for every set of groups, they sum to no more than the capacity of the lenders that the set
reaches (Hall's condition; the capacity function is that of a flow network, so it is submodular). Of all sets of groups
only those matter that hold *every* group whose lenders lie inside one union of neighbourhoods. A full mesh of n GPUs
has n + 1 such unions.
"""

from functools import lru_cache

MOST_UNIONS = 2048
"""Beyond this many unions in one island only single neighbourhoods and their common union are looked at: entitlements
may then promise more than can be placed, which leaves a lease waiting and does no other harm."""

Union = tuple[int, tuple[int, ...]]
"""A set of lenders, as a bit mask, and the groups whose lenders all lie in it."""


@lru_cache(maxsize=64)
def unions(reach: tuple[int, ...], span: int) -> tuple[Union, ...]:
    """Every union of neighbourhoods that can bind.

    `reach` has one bit mask per group: bit `pool * span + gpu` is set where the group may borrow. Groups that share no
    GPU, not even through another group, are never combined.
    """
    found: list[Union] = []
    for island in _islands(reach, span):
        masks = {reach[group] for group in island}
        closed: set[int] = set()
        for mask in sorted(masks):
            closed |= {mask | other for other in closed} | {mask}
            if len(closed) > MOST_UNIONS:
                everything = 0
                for each in masks:
                    everything |= each
                closed = masks | {everything}
                break
        found += [(mask, tuple(g for g in island if reach[g] | mask == mask)) for mask in sorted(closed)]
    return tuple(found)


def _islands(reach: tuple[int, ...], span: int) -> list[list[int]]:
    low = (1 << span) - 1
    islands: list[tuple[int, list[int]]] = []
    for group, mask in enumerate(reach):
        gpus, rest = 0, mask
        while rest:
            gpus |= rest & low
            rest >>= span
        members = [group]
        apart = []
        for other, others in islands:
            if other & gpus:
                gpus |= other
                members += others
            else:
                apart.append((other, others))
        islands = [*apart, (gpus, members)]
    return [sorted(members) for _, members in islands]


@lru_cache(maxsize=1024)
def bits(mask: int) -> tuple[int, ...]:
    """Positions of the set bits."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
