"""What the bound predicts for a whole trace: every instance a queue that is served as fast as the bound allows.

No steps, no batches, no chunks and no policy. A request that occupies `size` bytes for `generated` steps of a full
batch costs generated * size / K of the time of steps that read K bytes of keys and values, and the computing of its
prompt. It begins once so much time has gone by, for then others have left it the room; if its patience ends before,
the room is for the next. K is the share and, where instances lend, an even part of what idle neighbours have to spare,
up to what hides.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ema_cli.serving.bound import hideable, local_step, prefill
from ema_cli.serving.presets import GpuSpec, Model
from ema_cli.serving.trace import Request

SLOTS = 2000
"""Parts of the duration in which memory stays as it is."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a trace's requests are on average, each weighed by how long it occupies memory."""

    model: Model
    gpu: GpuSpec
    size: float
    """Bytes that a request of the batch occupies."""
    filled: float
    """Part of them that is filled on average, 0 to 1."""
    prompt: float
    """Tokens, of an average request."""

    @classmethod
    def of(cls, requests: Sequence[Request], model: Model, gpu: GpuSpec) -> "Workload":
        """From a trace's requests, at least one."""
        steps = sum(request.generated for request in requests)
        reserved = sum(request.generated * (request.prompt + request.generated) for request in requests)
        filled = sum(request.generated * (request.prompt + request.generated / 2) for request in requests)
        prompt = sum(request.prompt for request in requests) / len(requests)
        return cls(model, gpu, model.kv_per_token * reserved / steps, filled / reserved, prompt)

    def step(self, memory: float) -> float:
        """Seconds of a step whose batch fills `memory` bytes."""
        batch = max(1, int(memory / self.size))
        return local_step(self.model, self.gpu, kv=memory * self.filled, batch=batch)

    def stay(self, request: Request, memory: float) -> float:
        """Seconds from begin to end in a batch that fills `memory`: its steps, and one prompt for each in the batch."""
        prompts = memory / self.size * prefill(self.model, self.gpu, 1) * self.prompt
        return prompts + request.generated * self.step(memory)

    def cost(self, request: Request, memory: float) -> float:
        """Seconds of an instance with `memory` bytes that one request takes."""
        size = self.model.kv_per_token * (request.prompt + request.generated)
        # Where one request no longer fits beside the others, room stays empty: half a request on average.
        usable = max(memory - self.size / 2, self.size)
        return prefill(self.model, self.gpu, request.prompt) + request.generated * size / usable * self.step(usable)

    def capacity(self, requests: Sequence[Request], memory: float) -> float:
        """Requests a second that an instance with `memory` bytes serves at most."""
        return len(requests) / sum(self.cost(request, memory) for request in requests)


def lending(workload: Workload, *, share: int, link: float, keep: int, most: int, limit: int) -> "Split":
    """How instances of `share` bytes share them: each lends what it does not use, less `keep`, at most `most`.

    Each borrows what hides over `link`, at most `limit`. Bytes and bytes per second.
    """
    hides = hideable(workload.model.weights + share, link=link, read=workload.gpu.read)

    def split(wanted: Sequence[float]) -> list[float]:
        spare = sum(max(0.0, min(most, share - keep - want)) for want in wanted)
        asked = [max(0.0, min(want - share, hides / workload.filled, limit)) for want in wanted]
        level = _even(asked, spare)
        return [share + min(ask, level) for ask in asked]

    return split


def alone(memory: int) -> "Split":
    """Every instance has `memory` bytes."""
    return lambda wanted: [float(memory)] * len(wanted)


Split = Callable[[Sequence[float]], list[float]]
"""From the bytes that each instance could use to those that it has."""


def predict(
    workload: Workload, dealt: Sequence[Sequence[Request]], duration: float, patience: float, split: Split
) -> int:
    """Requests served within `duration` seconds."""
    queues = [_Queue(requests, patience) for requests in dealt]
    slot = duration / SLOTS
    served = 0
    for number in range(SLOTS):
        end = (number + 1) * slot
        memories = split([queue.wanted(workload, end) for queue in queues])
        served += sum(
            queue.serve(workload, end, slot, memory, duration) for queue, memory in zip(queues, memories, strict=True)
        )
    return served


class _Queue:
    def __init__(self, requests: Sequence[Request], patience: float) -> None:
        self.requests, self.patience = requests, patience
        self.came = self.next = 0
        self.waiting = 0  # tokens
        self.credit = 0.0  # seconds of service that the head of the queue has waited for
        self.ends: list[tuple[float, int]] = []
        self.held = 0  # tokens

    def wanted(self, workload: Workload, now: float) -> float:
        while self.came < len(self.requests) and self.requests[self.came].arrival <= now:
            self.waiting += self._tokens(self.came)
            self.came += 1
        while self.ends and self.ends[0][0] <= now:
            self.held -= heapq.heappop(self.ends)[1]
        return float((self.waiting + self.held) * workload.model.kv_per_token)

    def _tokens(self, index: int) -> int:
        return self.requests[index].prompt + self.requests[index].generated

    def serve(self, workload: Workload, end: float, slot: float, memory: float, duration: float) -> int:
        """Serve until `end`; how many of those that begin will be done within the duration."""
        self.credit += slot
        served = 0
        while self.next < self.came:
            request = self.requests[self.next]
            if end - request.arrival > self.patience:
                self._go()
                continue
            cost = workload.cost(request, memory)
            if cost > self.credit:
                return served
            self.credit -= cost
            self._go()
            self.held += request.prompt + request.generated
            full = min(memory, self.held * workload.model.kv_per_token)
            done = end + workload.stay(request, full)
            heapq.heappush(self.ends, (done, request.prompt + request.generated))
            served += done <= duration
        self.credit = 0.0  # room that nobody waits for is not saved up
        return served

    def _go(self) -> None:
        self.waiting -= self._tokens(self.next)
        self.next += 1


def _even(asked: Sequence[float], spare: float) -> float:
    """The level up to which `spare` fills all that is asked for: max-min."""
    left, level = sum(1 for ask in asked if ask > 0), 0.0
    for ask in sorted(ask for ask in asked if ask > 0):
        if (ask - level) * left > spare:
            return level + spare / left
        spare -= (ask - level) * left
        level, left = ask, left - 1
    return inf
