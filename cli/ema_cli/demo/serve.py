"""A worker's serving: the engine of `ema replay` says what to do, and here it is done, in real time, with real bytes.

The GPU's own work is time that passes. Everything else is real: pages that are taken and given back, bytes that are
written, stored, fetched and compared, and the waiting for them. While one macro-step passes the next is prepared, as
the host of a GPU does, so that this process's own time is not the model's.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Final

import ema
from ema_cli.demo.borrowed import Borrowed
from ema_cli.demo.growth import Growth
from ema_cli.demo.messages import FromWorker, Job, Progress, Result
from ema_cli.demo.own import Kept, Own
from ema_cli.demo.pattern import Pattern
from ema_cli.demo.scale import Clock, Scale
from ema_cli.serving.instance import Instance
from ema_cli.serving.outcome import Outcome
from ema_cli.serving.step import Active, Demand, MacroStep, Memory, Path

LEAD: Final = 0.02
"""Real seconds before a macro-step ends at which the next one is prepared."""
SOON: Final = 0.008
"""Real seconds that are waited for memory, before what is there must do."""
AHEAD: Final = 24
"""Pieces of a macro-step that may still be on their way when the next one is prepared."""
TOO_LATE: Final = 0.25
"""Real seconds that this process may be behind; more is not caught up with."""
SAMPLE: Final = 0.2
"""Real seconds between two reports."""
GROW_AT_ONCE: Final = 4
"""Chunks of borrowed memory in one request."""
QUEUE: Final = 0.5
"""Real seconds that such a request waits in the agent's queue."""
FETCH_SLOTS: Final = (16, 1 << 20)
"""How many, and real bytes of each."""
STORE_SLOTS: Final = (2, 128 << 10)
WINDOWS: Final = FETCH_SLOTS[0] * FETCH_SLOTS[1] + STORE_SLOTS[0] * STORE_SLOTS[1]
"""Real bytes of both windows. They are not scaled: a process that wakes another one takes the place of a flag that a
GPU sees, and takes a thousand times as long, so that more must be on its way meanwhile."""
TAIL: Final = 16 << 10
"""Real bytes of a borrowed request's newest tokens that stay in the workspace until there are more."""


class Serving:
    """One job, from the weights to the last check."""

    def __init__(self, job: Job, pool: ema.Pool, tell: Callable[[FromWorker], None]) -> None:
        self._job, self._pool, self._tell = job, pool, tell
        self._scale = Scale(job.size_scale, job.speed)
        per_token = self._scale.real(job.model.kv_per_token)
        self._per_token = per_token
        largest = max((r.prompt + r.generated for r in job.requests), default=0) * per_token
        weights = self._scale.real(job.model.weights)
        pattern = Pattern(job.seed, max(largest, weights))
        self._instance = Instance(
            model=job.model, gpu=job.gpu, share=job.share, link=job.link, limit=job.limit, patience=job.patience
        )
        self._borrowed = Borrowed(pool, pattern, pool.window(*FETCH_SLOTS), pool.window(*STORE_SLOTS))
        self._own = Own(pool.share(weights + self._scale.real(job.share)), pattern, weights)
        self._own.load_weights()
        self._kept: dict[int, Kept] = {}
        self._running: dict[int, Active] = {}
        self._finished: tuple[Active, ...] = ()
        self._outcome = Outcome(len(job.requests), job.duration)
        self._came = 0
        self._late = 0.0
        self._wrong = 0
        self._checked = weights
        self._sampled = 0.0
        self._changed = threading.Event()
        self._growths = (
            Growth("share", self._grow_own, lambda: self._own.grown, self._changed),
            Growth("region", self._grow_borrowed, lambda: self._borrowed.held, self._changed),
        )

    def run(self, clock: Clock) -> Result:
        """Serve until the duration is over. Raises what the client raises."""
        duration = self._job.duration
        start = 0.0
        while True:
            start = self._not_too_late(clock, start)
            if start >= duration:
                break
            self._sample(clock)
            self._finish()
            following = self._arrivals(start)
            memory = self._memory()
            step = self._instance.step(start, memory, following)
            if step is None:
                start = self._idle(clock, min(following, duration))
                continue
            waited = self._pool.exposed_wait
            alone = start + (step.end - step.start - step.exposed)
            self._carry_out(step, needed_at=clock.real(alone))
            exposed = (self._pool.exposed_wait - waited) * self._job.speed
            step = replace(step, end=alone + exposed, exposed=exposed)
            self._outcome.add(step)
            self._finished = step.finished
            start = step.end
            self._sleep(clock.real(start) - LEAD)
        self._end()
        return self._result()

    # --- time ---

    def _not_too_late(self, clock: Clock, start: float) -> float:
        behind = time.monotonic() - clock.real(start)
        if behind <= TOO_LATE:
            return start
        self._late += behind
        return clock.shown(time.monotonic())

    def _idle(self, clock: Clock, until: float) -> float:
        """Wait for a request or for memory; when that was."""
        self._borrowed.receive()
        while (left := clock.real(until) - time.monotonic()) > 0:
            if self._changed.wait(min(left, SAMPLE)):
                break
            self._sample(clock)
        self._changed.clear()
        return min(until, max(0.0, clock.shown(time.monotonic())))

    @staticmethod
    def _sleep(until: float) -> None:
        if (left := until - time.monotonic()) > 0:
            time.sleep(left)

    # --- memory ---

    def _memory(self) -> Memory:
        for growth in self._growths:
            if growth.failure is not None:
                raise growth.failure
        self._own.look()
        self._borrowed.look()
        self._steer(self._instance.demand())
        until = time.monotonic() + SOON
        for growth in self._growths:
            growth.wait(until)
        self._own.look()
        self._borrowed.look()
        borrowed = self._scale.shown(self._borrowed.arena.size)
        region = self._borrowed.region
        paths = (Path(borrowed, self._scale.shown_rate(region.rate)),) if region is not None and borrowed else ()
        return Memory(self._scale.shown(self._own.arena.size), paths)

    def _steer(self, demand: Demand) -> None:
        """Ask for what is missing; give back what is not needed."""
        page, chunk = self._own.page, self._pool.chunk
        own = min(-(-self._scale.real(demand.local) // page) * page, self._scale.real(self._job.share))
        borrowed = -(-self._scale.real(demand.borrowed) // chunk) * chunk
        for growth, wanted in zip(self._growths, (own, borrowed), strict=True):
            growth.want(wanted)
        kept = self._kept.values()
        _give_back(self._own, own, self._growths[0], (one for one in kept if not one.borrowed))
        _give_back(self._borrowed, borrowed, self._growths[1], (one for one in kept if one.borrowed))

    def _grow_own(self, size: int) -> None:
        self._own.share.grow(self._own.wanted(size), timeout=QUEUE)

    def _grow_borrowed(self, size: int) -> None:
        region, chunk = self._borrowed.region, self._pool.chunk
        held = self._borrowed.held
        size = min(size, held + GROW_AT_ONCE * chunk)
        if region is None:
            self._borrowed.region = self._pool.region(size, timeout=QUEUE)
        else:
            region.grow(size, timeout=QUEUE)

    # --- what a macro-step does ---

    def _arrivals(self, now: float) -> float:
        """Tell the instance who came; when the next one comes."""
        requests = self._job.requests
        first = self._came
        while self._came < len(requests) and requests[self._came].arrival <= now:
            self._came += 1
        self._instance.arrive(requests[first : self._came])
        return requests[self._came].arrival if self._came < len(requests) else inf

    def _carry_out(self, step: MacroStep, *, needed_at: float) -> None:
        for active in step.parked:
            del self._running[active.order]
        for active in (*step.resumed, *step.admitted):
            self._running[active.order] = active
        for active in step.moved_home:
            self._running[active.order] = active
            self._move_home(active, needed_at)
        old = [self._kept[order] for order, active in self._running.items() if active.borrowed and order in self._kept]
        for active in step.admitted:
            self._admit(active)
        if old:
            self._borrowed.fetch(self._borrowed.pieces(old) * step.steps, needed_at=needed_at)
        self._generate(step.steps)
        self._borrowed.receive(AHEAD)

    def _admit(self, active: Active) -> None:
        size = (active.request.prompt + active.request.generated) * self._per_token
        kept = Kept(active.request.id + 1, size, active.borrowed, filled=active.request.prompt * self._per_token)
        self._kept[active.order] = kept
        self._write(kept)

    def _write(self, kept: Kept) -> None:
        if not kept.borrowed:
            self._own.write(kept, kept.filled)
        elif not kept.written or kept.filled - kept.written >= TAIL:
            self._borrowed.store(kept, kept.filled)

    def _generate(self, steps: int) -> None:
        """Every running request gets a token a step."""
        for order in self._running:
            kept = self._kept[order]
            kept.filled = min(kept.size, kept.filled + steps * self._per_token)
            self._write(kept)

    def _move_home(self, active: Active, needed_at: float) -> None:
        kept = self._kept[active.order]
        home = Kept(kept.owner, kept.size, borrowed=False, filled=kept.filled)
        self._own.room(home, kept.written)
        pieces = [
            replace(p, parts=tuple(replace(q, kept=home) for q in p.parts)) for p in self._borrowed.pieces([kept])
        ]
        self._borrowed.fetch(pieces, needed_at=needed_at, home=self._own)
        self._borrowed.receive()
        self._borrowed.give(kept.extents)
        self._kept[active.order] = home
        self._own.write(home, home.filled)

    def _finish(self) -> None:
        """The last macro-step's requests are done: their bytes are checked once more, and their room is free."""
        for active in self._finished:
            del self._running[active.order]
            kept = self._kept.pop(active.order)
            if kept.borrowed:
                self._borrowed.give(kept.extents)
            else:
                self._check([kept])
                self._own.arena.give(kept.extents)
        self._finished = ()

    def _check(self, kept: Iterable[Kept]) -> None:
        for one in kept:
            self._wrong += self._own.wrong(one)
            self._checked += one.written

    # --- the end ---

    def _end(self) -> None:
        for growth in self._growths:
            growth.close()
        self._borrowed.settle()
        self._arrivals(self._job.duration)
        self._outcome.close([self._instance])
        last = [kept for kept in self._kept.values() if kept.borrowed]
        if last:
            self._borrowed.fetch(self._borrowed.pieces(last), needed_at=inf)
            self._borrowed.settle()
        self._check(kept for kept in self._kept.values() if not kept.borrowed)
        self._wrong += self._own.wrong_weights()

    def _result(self) -> Result:
        return Result(
            outcome=self._outcome,
            fetched=self._borrowed.fetched,
            stored=self._borrowed.stored,
            exposed=self._pool.exposed_wait,
            wrong=self._wrong + self._borrowed.wrong,
            checked=self._checked + self._borrowed.fetched,
            late=self._late,
        )

    def _sample(self, clock: Clock) -> None:
        now = time.monotonic()
        if now - self._sampled < SAMPLE:
            return
        self._sampled = now
        instance, borrowed = self._instance, self._borrowed
        self._tell(
            Progress(
                moment=clock.shown(now),
                local=instance.used_local,
                borrowed=instance.used_borrowed,
                granted=self._scale.shown(borrowed.held),
                running=instance.running,
                parked=instance.parked,
                queue=len(instance.queue),
                served=self._outcome.served,
                tokens=self._outcome.tokens,
                link_bytes=borrowed.fetched + borrowed.stored,
                wrong=borrowed.wrong + self._wrong,
            )
        )


def _give_back(memory: Own | Borrowed, size: int, growth: Growth, kept: Iterable[Kept]) -> None:
    """Keep only `size` bytes, unless more are just coming: then at the next macro-step."""
    if size < memory.arena.size and growth.busy.acquire(blocking=False):
        try:
            memory.look()
            memory.shrink(size, kept)
        finally:
            growth.busy.release()
