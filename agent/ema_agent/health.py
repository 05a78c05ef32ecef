"""Health: a verdict for each GPU from what it reports, from polling, and from what it fails to do.

Events come late or not at all, so the list of devices is polled too. A verdict clears with hysteresis: after a recovery
the GPU must stay quiet before it lends again. Errors that a program caused are no fault of the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ema_core.ids import GpuId
from ema_driver.protocol import HealthEvent, HealthKind

PROGRAM_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a faulty program causes: page fault, engine exception, preemptive removal and the like."""
QUIET: Final = 5.0
"""Seconds without a report before a recovered GPU is healthy again."""
FORGET: Final = 60.0
"""Seconds after which an XID that never was reported as recovered counts as recovered."""
MISSING: Final = "it is enumerated no more"


@dataclass(slots=True)
class Sickness:
    """Why a GPU is not healthy."""

    why: str
    lost: bool
    since: float
    recovered_at: float | None = None


class Health:
    """Verdicts. Pure but for the times it is given."""

    def __init__(self, quiet: float = QUIET) -> None:
        self._quiet = quiet
        self._sick: dict[GpuId, Sickness] = {}

    @property
    def verdicts(self) -> Mapping[GpuId, str]:
        """GPU → why it is sick; healthy ones are not in it."""
        return {gpu: s.why for gpu, s in self._sick.items()}

    def report(self, events: Sequence[HealthEvent], now: float) -> set[GpuId]:
        """Take in events; GPUs that were lost by them."""
        lost: set[GpuId] = set()
        for event in events:
            sick = self._sick.get(event.gpu)
            if event.kind is HealthKind.RECOVERED:
                if sick is not None:
                    sick.recovered_at = now
            elif event.kind is HealthKind.LOST:
                if sick is None or not sick.lost:
                    lost.add(event.gpu)
                self._sick[event.gpu] = Sickness(event.message or "it fell off the bus", lost=True, since=now)
            elif event.code not in PROGRAM_XIDS and (sick is None or not sick.lost):
                self._sick[event.gpu] = Sickness(f"XID {event.code} {event.message}".strip(), lost=False, since=now)
        return lost

    def seen(self, known: Sequence[GpuId], present: Sequence[GpuId], now: float) -> set[GpuId]:
        """Compare with the devices that are there now; GPUs that are gone without an event."""
        gone: set[GpuId] = set()
        for gpu in known:
            sick = self._sick.get(gpu)
            if gpu not in present and (sick is None or not sick.lost):
                self._sick[gpu] = Sickness(MISSING, lost=True, since=now)
                gone.add(gpu)
            elif gpu in present and sick is not None and sick.why == MISSING and sick.recovered_at is None:
                sick.recovered_at = now
        return gone

    def clear(self, present: Sequence[GpuId], now: float) -> set[GpuId]:
        """GPUs that have been quiet for long enough to be healthy again."""
        healed = set()
        for gpu, sick in list(self._sick.items()):
            if sick.recovered_at is None and not sick.lost and now - sick.since > FORGET:
                sick.recovered_at = now
            if sick.recovered_at is not None and gpu in present and now - sick.recovered_at >= self._quiet:
                del self._sick[gpu]
                healed.add(gpu)
        return healed
