"""What a cache tells of itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ema.transformers.rows import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ema.transformers.beyond import Beyond
    from ema.transformers.layer import Layer


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where keys and values are just now, and what that costs."""

    tokens: int
    """Those that are parked are not counted."""
    remote_tokens: int
    """The oldest ones, which lie on neighbours though the cache is in use."""
    local_bytes: int
    slot_bytes: int
    """Bytes of local memory that the slots take which remote tokens pass through."""
    remote_bytes: int
    """Keys and values on neighbours, parked or not. Borrowed are whole chunks."""
    fetched_bytes: int
    """Bytes that each call of the model fetches."""
    fetch_seconds: float
    """How long that takes at the rate of where they lie now: no call is shorter. Infinite if it cannot be said."""
    exposed_wait: float
    """Seconds that this process has waited for slots, in all. On GPUs it is the stream that waits: not counted."""


def report_of(layers: "Sequence[Layer]", beyond: "Beyond | None", parked: int | None) -> CacheReport:
    """Of these layers. `parked`: bytes of what was local, if that is parked."""
    return CacheReport(
        tokens=max(layer.get_seq_length() for layer in layers),
        remote_tokens=max(layer.far for layer in layers),
        local_bytes=sum(layer.local_bytes for layer in layers) if parked is None else 0,
        slot_bytes=beyond.slot_bytes if beyond is not None else 0,
        remote_bytes=sum(layer.far_bytes for layer in layers) + (parked or 0),
        fetched_bytes=sum(size_of(layer.rows) for layer in layers),
        fetch_seconds=beyond.fetch_seconds if beyond is not None else 0.0,
        exposed_wait=beyond.exposed_wait if beyond is not None else 0.0,
    )
