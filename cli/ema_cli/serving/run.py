"""One run of a trace in virtual time, on as many instances as there are GPUs."""

import heapq
from collections.abc import Sequence
from math import inf

from ema_cli.serving.instance import Instance
from ema_cli.serving.node import Node
from ema_cli.serving.outcome import Outcome, Sample
from ema_cli.serving.step import Memory
from ema_cli.serving.trace import Request

SAMPLES = 240
"""Moments at which the memory of every GPU is noted for the picture."""


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
        for instance, requests, came in zip(self._instances, self._dealt, self._came, strict=True):
            instance.arrive(requests[came:])
        self.outcome.close(self._instances)
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
        self.outcome.add(step)
        self._free_at[index] = step.end
        heapq.heappush(self._due, (step.end, index))

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
