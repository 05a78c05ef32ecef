"""One run of a trace in virtual time, on as many instances as there are GPUs."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from ema_cli.serving.instance import Instance
from ema_cli.serving.node import Node, Traffic
from ema_cli.serving.step import Memory
from ema_cli.serving.trace import Request

SAMPLES = 240
"""Moments at which the memory of every GPU is noted for the picture."""


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


class Run:
    """Instances that take macro-steps side by side; with a `node` they lend to each other."""

    def __init__(
        self, instances: Sequence[Instance], dealt: Sequence[Sequence[Request]], duration: float, node: Node | None
    ) -> None:
        self._instances, self._dealt, self._node = instances, dealt, node
        self._came = [0] * len(instances)
        self._free_at = [0.0] * len(instances)  # when the macro-step in progress ends
        self._due: list[tuple[float, int]] = []
        self.outcome = Outcome(sum(map(len, dealt)), duration)
        if node is not None:
            self.outcome.traffic = node.traffic

    def finish(self) -> Outcome:
        """Run to the end of the duration."""
        duration = self.outcome.duration
        for index, requests in enumerate(self._dealt):
            if requests:
                heapq.heappush(self._due, (requests[0].arrival, index))
        sample = 0
        while self._due and self._due[0][0] < duration:
            now, index = heapq.heappop(self._due)
            while sample * duration <= now * SAMPLES:
                self._note(sample * duration / SAMPLES)
                sample += 1
            if now >= self._free_at[index]:  # else: woken while it was busy; it will ask at its next boundary
                self._turn(index, now)
        for late in range(sample, SAMPLES + 1):
            self._note(late * duration / SAMPLES)
        self._settle()
        return self.outcome

    def _turn(self, index: int, now: float) -> None:
        instance, requests = self._instances[index], self._dealt[index]
        came = self._came[index]
        while came < len(requests) and requests[came].arrival <= now:
            came += 1
        instance.arrive(requests[self._came[index] : came])
        self._came[index] = came
        following = requests[came].arrival if came < len(requests) else inf
        memory = self._memory(index, now)
        step = instance.step(now, memory, following)
        if step is None:
            wake = following
            ready = self._node.local_ready(index) if self._node is not None else None
            heapq.heappush(self._due, (min(wake, ready or inf), index))
            return
        outcome = self.outcome
        outcome.waits += [now - active.request.arrival for active in step.admitted]
        outcome.preemptions += len(step.parked)
        heapq.heappush(self._due, (step.end, index))
        self._free_at[index] = step.end
        if step.end > outcome.duration:
            return  # cut off by the end: its tokens do not count
        outcome.tokens += step.tokens
        outcome.fetched += step.fetched
        outcome.stored += step.stored
        outcome.exposed += step.exposed
        outcome.busy += step.end - step.start
        outcome.served += len(step.finished)
        outcome.latencies += [step.end - active.request.arrival for active in step.finished]

    def _memory(self, index: int, now: float) -> Memory:
        if self._node is None:
            return Memory(self._instances[index].share)
        if self._node.want(index, self._instances[index].demand(), now):
            # Others may have got memory: those that stand still must look.
            for other, free_at in enumerate(self._free_at):
                if other != index and free_at <= now and self._instances[other].queue:
                    heapq.heappush(self._due, (now, other))
        return self._node.memory(index, now)

    def _note(self, moment: float) -> None:
        node = self._node
        self.outcome.samples.append(
            (
                moment,
                tuple(
                    Sample(
                        instance.used_local,
                        node.lent(index) if node else 0,
                        instance.used_borrowed,
                        node.granted(index) if node else 0,
                    )
                    for index, instance in enumerate(self._instances)
                ),
            )
        )

    def _settle(self) -> None:
        outcome = self.outcome
        for index, instance in enumerate(self._instances):
            instance.arrive(self._dealt[index][self._came[index] :])
            instance.leave(outcome.duration)
            outcome.waits += [instance.patience] * len(instance.left)
            outcome.waits += [outcome.duration - request.arrival for request in instance.queue]
            outcome.gave_up += len(instance.left)
            outcome.too_large += [request.id for request in instance.refused]
        outcome.unfinished = outcome.offered - outcome.served - outcome.gave_up - len(outcome.too_large)
