"""What hostile clients have in common: steps to begin with, and the refusal that names its field."""

from pathlib import Path

from hypothesis import HealthCheck, settings

from ema_core import wire

STEP = wire.CopyStep(0, 0, 4096, 0)
HUGE = 2**64 - 1
LIVE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def refused(said: wire.AgentMessage, field: str = "") -> wire.Refused:
    assert isinstance(said, wire.Refused), said
    if field:
        assert (said.kind, said.field) == (wire.Kinds.BAD, field), said
        assert said.value
        assert said.expected
    return said


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
