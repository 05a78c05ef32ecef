"""What a spill tells of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpillReport:
    """What happened so far."""

    steps: int
    """Forwards with their backwards."""
    learnt: int
    """How often a way of going was learnt."""
    differing: int
    """Steps that did not go as learnt, and kept what they saved from there on."""
    spilled_bytes: int
    """Bytes that go out and come back in one step, as learnt last."""
    kept_bytes: int
    """Bytes (of large enough tensors) that such a step keeps in local memory."""
    in_place_bytes: int
    """Bytes of those that go out that may be used in the slots where they come back; the others are copied first."""
    slot_bytes: int
    """Bytes of local memory that the slots take."""
    exposed_wait: float
    """Seconds that the computation has waited for slots, in all; on a GPU, of what it has done by now."""
    limited: str
    """Why less is spilled than would hide; empty if nothing stands against it."""
