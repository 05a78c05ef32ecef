"""How many tokens of each layer lie on neighbours, so that what is local stays within its budget. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ema import errors


@dataclass(frozen=True, slots=True)
class Size:
    """One layer, as its tokens are now."""

    far: int
    """Tokens on neighbours."""
    far_bytes: int
    """Bytes that they take there."""
    stride: int
    """Bytes that each further token takes there."""
    token: int
    """Bytes of each local token."""

    def after(self, far: int) -> int:
        """Bytes on neighbours once at least so many tokens are there."""
        return self.far_bytes + max(0, far - self.far) * self.stride


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be so."""

    far: int
    """Tokens of each layer on neighbours."""
    slots: int
    """Bytes of local memory that slots take."""


def slots_at(layers: Sequence[Size], far: int, slots: int, grain: int) -> int:
    """Bytes of `slots` slots, each for the largest layer's `far` tokens, in multiples of `grain` bytes."""
    return slots * -(-_largest(layers, far) // grain) * grain


def plan(layers: Sequence[Size], tokens: int, local: int, slots: int, grain: int) -> Plan:
    """For so many tokens: as few of them remote as leave half of the room beside the slots for more.

    The slots grow with what is remote, until no room is left: raises LimitReached.
    """
    each = sum(layer.token for layer in layers)
    least = min(tokens, max(layer.far for layer in layers))

    def half(far: int) -> int:
        # Not rounded, so that it never grows with `far`: one layer's slots are smaller than all layers' tokens.
        return 2 * each * (tokens - far) + slots * (_largest(layers, far) + grain)

    far = bisect_left(range(least, tokens + 1), -local, key=lambda far: -half(far)) + least
    if far > tokens:
        raise errors.LimitReached(
            f"{tokens} tokens of {each} bytes need {half(tokens)} bytes for slots alone, even with all of them on "
            f"neighbours; local is {local}"
        )
    return Plan(far, slots_at(layers, far, slots, grain))


def _largest(layers: Sequence[Size], far: int) -> int:
    return max(layer.after(far) for layer in layers)
