"""What a cache tells of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where keys and values are just now, and what that costs."""

    tokens: int
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
