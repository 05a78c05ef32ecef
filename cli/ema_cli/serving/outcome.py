"""What came of a run, in virtual time or real."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ema_cli.serving.instance import Instance
from ema_cli.serving.step import MacroStep


@dataclass(slots=True)
class Traffic:
    """What the policy's decisions moved."""

    moved: int = 0
    """Bytes."""
    reclaims: list[float] = field(default_factory=list)
    """Seconds, one for every time a lender took memory back."""
    plans: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of one GPU at one moment, in bytes."""

    local: int
    """Keys and values in its own share."""
    lent: int
    borrowed: int
    """Keys and values elsewhere."""
    granted: int
    """Held elsewhere, used or not."""


@dataclass(slots=True)
class Outcome:
    """What came of a run. Times are seconds."""

    offered: int
    duration: float
    served: int = 0
    waits: list[float] = field(default_factory=list)
    """From arrival to begin; requests that never began count with the time they waited."""
    latencies: list[float] = field(default_factory=list)
    """From arrival to the last token, of requests that were served."""
    tokens: int = 0
    preemptions: int = 0
    fetched: int = 0
    stored: int = 0
    exposed: float = 0.0
    busy: float = 0.0
    """Time in macro-steps, over all instances."""
    gave_up: int = 0
    too_large: list[int] = field(default_factory=list)
    """Requests, by id, that no instance could hold."""
    unfinished: int = 0
    """Waiting or running at the end."""
    traffic: Traffic = field(default_factory=Traffic)
    samples: list[tuple[float, tuple[Sample, ...]]] = field(default_factory=list)
    """Moments, and the memory of every GPU then."""

    def add(self, step: MacroStep) -> None:
        """A macro-step of any instance. One that the end of the duration cuts off counts for its waits only."""
        self.waits += [step.start - active.request.arrival for active in step.admitted]
        self.preemptions += len(step.parked)
        if step.end > self.duration:
            return
        self.tokens += step.tokens
        self.fetched += step.fetched
        self.stored += step.stored
        self.exposed += step.exposed
        self.busy += step.end - step.start
        self.served += len(step.finished)
        self.latencies += [step.end - active.request.arrival for active in step.finished]

    def close(self, instances: Iterable[Instance]) -> None:
        """The duration is over; every instance was told of all its requests."""
        for instance in instances:
            instance.leave(self.duration)
            self.waits += [instance.patience] * len(instance.left)
            self.waits += [self.duration - request.arrival for request in instance.queue]
            self.gave_up += len(instance.left)
            self.too_large += [request.id for request in instance.refused]
        self.unfinished = self.offered - self.served - self.gave_up - len(self.too_large)
