"""One model on one GPU that serves requests by continuous batching, as a pure step machine.

The caller says what memory there is now and asks for the next *macro-step*: some prompts, then several decode steps
during which nobody comes or goes. Rules:

- A request is admitted, in order of arrival, once there is memory for all its tokens: in the GPU's own share, else in
  borrowed memory, and there only while the bound says that its bytes hide behind the step. Otherwise it waits.
- A request whose bytes lie in borrowed memory is fetched in every step. When less hides than before (memory was
  reclaimed, its bytes moved to a slower place), those with the least progress are *parked*: their bytes stay where
  they are, nothing is computed again, and they go on first as soon as they hide.
- While nobody waits, requests move from borrowed memory into free room of the share, oldest first.
- A request that has not begun `patience` seconds after it came leaves.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, inf

from ema_cli.serving.bound import hideable, local_step, prefill
from ema_cli.serving.presets import GpuSpec, Model
from ema_cli.serving.step import Active, Demand, Group, MacroStep, Memory, filled
from ema_cli.serving.trace import Request

PREFILL_TOKENS = 8192
"""Prompt tokens that one macro-step takes at most, so that running requests are not held up for long."""
STEPS_BETWEEN_PREFILLS = 4
LONGEST = 0.5
"""Seconds of decoding after which a macro-step ends anyway, so that changes of memory are seen."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Who came, stopped and went on at the start of a macro-step."""

    parked: Sequence[Active]
    resumed: Sequence[Active]
    moved_home: Sequence[Active]
    admitted: Sequence[Active]
    more: bool
    """More would have been admitted if it were not for the prompts' budget."""


class Instance:
    """A model on a GPU. `share` is the memory for keys and values that is its own, in bytes.

    `link` is the rate at which memory could be borrowed, 0 for never; `limit` the most that it may borrow, in bytes.

    The caller's loop, at the end of every macro-step and whenever the instance stands still and something changed:
    `arrive`, `demand` (and have it granted or not), `step`. Between a step's start and its end the instance already
    is what it will be at the end; `demand` is meant for ends. What `step` is given as borrowed memory must be at least
    `used_borrowed`: bytes that are kept change their place, they are not lost.
    """

    def __init__(
        self,
        *,
        model: Model,
        gpu: GpuSpec,
        share: int,
        link: float = 0,
        limit: int = 0,
        patience: float = inf,
    ) -> None:
        self.model, self.gpu, self.share, self.link, self.limit, self.patience = (
            model,
            gpu,
            share,
            link,
            limit,
            patience,
        )
        self.queue: deque[Request] = deque()
        self.refused: list[Request] = []
        """Requests that this instance can never hold."""
        self.left: list[Request] = []
        """Requests that ran out of patience."""
        self._queued = 0
        self._tick = 0
        self._orders, self._sequence = count(), count()
        self._local, self._remote = Group(), Group()
        self._parked: deque[Active] = deque()
        self._parked_size = 0
        self._borrowers: dict[int, Active] = {}  # by order of admission; running and parked alike
        self._ends: list[tuple[int, int, int, Active]] = []  # step of the end, sequence, `since` (stale if it differs)
        hides = hideable(model.weights + share, link=link, read=gpu.read) if link else 0.0
        self._most_borrowed = int(min(limit, hides))

    def size_of(self, request: Request) -> int:
        """Bytes of all of a request's keys and values."""
        return (request.prompt + request.generated) * self.model.kv_per_token

    def arrive(self, requests: Iterable[Request]) -> None:
        """Requests come, in order of arrival."""
        largest = max(self.share, self._most_borrowed)
        for request in requests:
            size = self.size_of(request)
            if size > largest:
                self.refused.append(request)
            else:
                self.queue.append(request)
                self._queued += size

    @property
    def running(self) -> int:
        """Requests that run."""
        return self._local.n + self._remote.n

    @property
    def parked(self) -> int:
        """Requests that have memory and do not run."""
        return len(self._parked)

    @property
    def used_local(self) -> int:
        """Bytes of the share that requests hold."""
        return self._local.size

    @property
    def used_borrowed(self) -> int:
        """Borrowed bytes that requests hold."""
        return self._remote.size + self._parked_size

    def borrowing(self) -> list[Active]:
        """Requests whose bytes lie in borrowed memory, in order of admission."""
        return list(self._borrowers.values())

    def demand(self) -> Demand:
        """What this instance could use now, were it there."""
        local = min(self.share, self._local.size + self._queued)
        beyond = self._local.size + self._queued - local
        held = self.used_borrowed
        if not self.link:
            return Demand(local, 0)
        # Reserved bytes are not all filled yet: as many more may be reserved as the filled ones leave to hide.
        filled = self._remote.tokens(self._tick) * self.model.kv_per_token
        slack = self._remote.size - filled
        most = min(self.limit, self._most_borrowed + int(slack))
        return Demand(local, max(held, min(most, held + beyond)))

    def step(self, now: float, memory: Memory, next_arrival: float = inf) -> MacroStep | None:
        """The next macro-step, or None while nothing can run (then ask again after an arrival or with more memory).

        `next_arrival` is when the next request comes that `arrive` was not yet told of: a macro-step with room left
        ends soon after it.
        """
        self._lose_patience(now)
        parked = self._park(memory)
        home = self._move_home(memory)
        resumed = self._resume(memory)
        admitted, more = self._admit(memory)
        if not self.running:
            return None
        return self._run(now, memory, next_arrival, _Changes(parked, resumed, home, admitted, more))

    def leave(self, now: float) -> None:
        """Let requests go whose patience has ended by `now`; `step` does so by itself."""
        self._lose_patience(now)

    # How long a step takes

    def _local_time(self, tick: float) -> float:
        kv = (self._local.tokens(tick) + self._remote.tokens(tick)) * self.model.kv_per_token
        return local_step(self.model, self.gpu, kv=kv, batch=self.running)

    def _link_time(self, remote: float, memory: Memory) -> float:
        """Seconds to fetch `remote` bytes that lie on the fastest paths: the parked and the cold are spilled first."""
        longest = 0.0
        for path in memory.paths:
            here = min(remote, path.size)
            longest = max(longest, here / path.rate)
            remote -= here
        return inf if remote > 0 else longest

    def _hides(self, extra_tokens: int, memory: Memory) -> bool:
        """Whether a step hides all borrowed bytes with a further request of `extra_tokens`."""
        per_token = self.model.kv_per_token
        remote = (self._remote.tokens(self._tick) + extra_tokens) * per_token
        kv = self._local.tokens(self._tick) * per_token + remote
        batch = self.running + (extra_tokens > 0)
        return self._link_time(remote, memory) <= local_step(self.model, self.gpu, kv=kv, batch=batch)

    # Who runs

    def _lose_patience(self, now: float) -> None:
        while self.queue and now - self.queue[0].arrival > self.patience:
            self.left.append(self._pop())

    def _pop(self) -> Request:
        request = self.queue.popleft()
        self._queued -= self.size_of(request)
        return request

    def _begin(self, active: Active) -> None:
        active.since = self._tick
        (self._remote if active.borrowed else self._local).add(active)
        heapq.heappush(self._ends, (self._tick + active.left, next(self._sequence), active.since, active))

    def _park(self, memory: Memory) -> list[Active]:
        """Stop borrowed requests, the least far first, until the rest hides as before."""
        if not self._remote.n or self._hides(0, memory):
            return []
        running = [active for active in self._borrowers.values() if not active.parked]
        running.sort(key=lambda active: (self._progress(active), -active.order))
        stopped: list[Active] = []
        for active in running:
            if self._hides(0, memory):
                break
            self._stop(active)
            active.parked = True
            self._parked_size += active.size
            stopped.append(active)
        self._parked = deque(sorted([*self._parked, *stopped], key=lambda active: active.order))
        return stopped

    def _progress(self, active: Active) -> int:
        return active.request.generated - active.left + self._tick - active.since

    def _resume(self, memory: Memory) -> list[Active]:
        resumed: list[Active] = []
        # With nothing running a parked request goes on even if it waits for the link: slow is better than never.
        while self._parked and (not self.running or self._hides(filled(self._parked[0]), memory)):
            resumed.append(self._unpark(self._parked[0]))
            self._begin(resumed[-1])
        return resumed

    def _unpark(self, active: Active) -> Active:
        self._parked.remove(active)
        self._parked_size -= active.size
        active.parked = False
        return active

    def _move_home(self, memory: Memory) -> list[Active]:
        """Into free room of the share: parked requests; and, while nobody waits for it, running ones."""
        moved: list[Active] = []
        for active in list(self._parked if self.queue else self._borrowers.values()):
            if self._local.size + active.size > memory.local:
                break
            if active.parked:
                self._unpark(active)
            else:
                self._stop(active)
            active.borrowed = False
            del self._borrowers[active.order]
            self._begin(active)
            moved.append(active)
        return moved

    def _stop(self, active: Active) -> None:
        self._remote.remove(active)
        active.left -= self._tick - active.since
        active.since = -1  # makes its entry among the ends stale

    def _admit(self, memory: Memory) -> tuple[list[Active], bool]:
        """Admit what fits, and whether more would have if it were not for the prompts' budget."""
        admitted: list[Active] = []
        budget = PREFILL_TOKENS
        borrowed = memory.borrowed
        while self.queue:
            request = self.queue[0]
            size = self.size_of(request)
            fits = self._local.size + size <= memory.local
            if not fits and not (
                not self._parked and self.used_borrowed + size <= borrowed and self._hides(request.prompt, memory)
            ):
                return admitted, False
            if admitted and request.prompt > budget:
                return admitted, True
            self._pop()
            budget -= request.prompt
            active = Active(request, size, next(self._orders), borrowed=not fits, left=request.generated)
            if active.borrowed:
                self._borrowers[active.order] = active
            self._begin(active)
            admitted.append(active)
        return admitted, False

    # One macro-step

    def _run(self, now: float, memory: Memory, next_arrival: float, changes: _Changes) -> MacroStep:
        per_token = self.model.kv_per_token
        prompts = sum(active.request.prompt for active in changes.admitted)
        computing = prefill(self.model, self.gpu, prompts)
        written = sum(active.request.prompt for active in changes.admitted if active.borrowed) * per_token
        moved = sum(filled(active) for active in changes.moved_home) * per_token
        fastest = memory.paths[0].rate if memory.paths else inf

        until_end = self._next_end() - self._tick
        guess = self._local_time(self._tick)
        steps = min(until_end, ceil(LONGEST / guess))
        if changes.more:
            steps = min(steps, STEPS_BETWEEN_PREFILLS)
        elif not self.queue and next_arrival < inf:
            steps = min(steps, max(1, ceil((next_arrival - now - computing) / guess)))

        # The batch grows by one token a request and step, so the middle of the macro-step stands for all its steps.
        middle = self._tick + steps / 2
        local = self._local_time(middle)
        remote = self._remote.tokens(middle) * per_token
        link = self._link_time(min(remote, memory.borrowed), memory)
        tokens = self.running * steps
        stored = written + self._remote.n * steps * per_token
        # Both directions of the link work beside the kernels; moves home and stores may take the whole macro-step.
        alone = computing + steps * local
        took = max(computing + steps * max(local, link), steps * link + moved / fastest, stored / fastest)
        self._tick += steps
        return MacroStep(
            start=now,
            end=now + took,
            steps=steps,
            admitted=tuple(changes.admitted),
            resumed=tuple(changes.resumed),
            parked=tuple(changes.parked),
            moved_home=tuple(changes.moved_home),
            finished=tuple(self._finish()),
            tokens=tokens,
            fetched=int(remote * steps) + moved,
            stored=stored,
            exposed=took - alone,
        )

    def _next_end(self) -> int:
        ends = self._ends
        while ends[0][3].since != ends[0][2]:
            heapq.heappop(ends)
        return ends[0][0]

    def _finish(self) -> Iterable[Active]:
        ends = self._ends
        while ends and (ends[0][0] <= self._tick or ends[0][3].since != ends[0][2]):
            _, _, since, active = heapq.heappop(ends)
            if active.since != since:
                continue
            (self._remote if active.borrowed else self._local).remove(active)
            if active.borrowed:
                del self._borrowers[active.order]
            active.left = 0
            active.since = -1
            yield active
