"""Runs under way with one agent: two at a time, numbered, told of in the notice page.

A `Runs` lives as long as its agent's connection. Tickets keep the one they were made with, so a wait for copies of an
agent that is gone ends with `AgentLost`, whatever agent has come since.
"""

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ema import arguments, errors
from ema.channel import Channel
from ema.tickets import Ticket
from ema_core import wire
from ema_core.wire import CopyStep
from ema_driver.protocol import Words

if TYPE_CHECKING:
    from ema.link import Link
    from ema.program import Program

SLICE: Final = 0.1
"""Seconds of one wait, after which it is asked whether the agent still lives."""
SETTLE: Final = 1.0
"""Seconds."""
_MASK: Final = 0xFFFFFFFF


class Runs:
    """Starts runs and waits for them. Thread-safe."""

    def __init__(self, pool: "Link", channel: Channel, shared: Words, notice: Words) -> None:
        self._pool, self._channel, self._notice = pool, channel, notice
        self.shared = shared
        """The page of slot flags."""
        self._lock = threading.Lock()
        self._outstanding: list[Ticket] = []
        self._seq = 0
        self._program_seqs: dict[int, int] = {}
        """By program number, not by program: the notice words of a number go on when another program has it."""
        self._refused: dict[int, tuple[int, errors.EmaError]] = {}
        """Word → number of a run that the agent refused, and why."""
        self.finished: errors.EmaError | None = None
        """Why nothing of this is true any more: the pool was closed, or has another agent by now."""
        self.into: dict[int, Ticket] = {}
        """Slot → the last run without a program that names it."""

    def run(self, steps: Sequence[CopyStep], *, store: bool) -> Ticket:
        """Copies without a program."""
        with self._lock:
            seq = self._seq + 1
            if any(t.word == wire.run_word(-1, seq) and not self._over(t) for t in self._outstanding):
                # The run before last goes on and the last one has ended: the free word belongs to the next number.
                seq += 1
            ticket = Ticket(self, wire.run_word(-1, seq), seq, steps)
            message = wire.Run(seq, store, list(steps))
            try:
                self._admit(ticket)
                for step in steps:
                    self.into[step.slot] = ticket
                self._channel.send(message)
                self._seq = seq
            except KeyboardInterrupt:
                if ticket in self._outstanding:
                    # It was let in, so it has to be sent, be it twice: the agent ignores what it has seen.
                    self._channel.send(message)
                    self._seq = seq
                raise
        return ticket

    def start(self, program: "Program") -> Ticket:
        """A program's next run."""
        number = program.number
        with self._lock:
            seq = self._program_seqs.get(number, 0) + 1
            ticket = Ticket(self, wire.run_word(number, seq), seq, program)
            message = wire.Start(number, seq)
            try:
                self._admit(ticket)
                self._channel.send(message)
                self._program_seqs[number] = seq
            except KeyboardInterrupt:
                if ticket in self._outstanding:
                    self._channel.send(message)
                    self._program_seqs[number] = seq
                raise
        return ticket

    def started(self, program: "Program") -> int:
        """How many runs have been started under this program's number."""
        return self._program_seqs.get(program.number, 0)

    @property
    def busy(self) -> bool:
        """Whether anything that was started has not ended. Raises AgentLost."""
        self._alive()
        return not all(map(self._over, self._outstanding))

    def ended(self, word: int, seq: int) -> bool:
        """Whether a run has been started and has ended."""
        if self.finished is not None:
            raise self.finished
        load, number = self._notice.load, seq & _MASK
        started = load(wire.NOTICE_STARTED + word)
        later = started != number and (started - number) & _MASK < 1 << 31
        ended = later or (started == number and load(wire.NOTICE_RUNS + word) == 0)
        if ended:
            self.believe()
        return ended

    def believe(self) -> None:
        """Raise AgentLost if the session was over when a word was read: then it says nothing about bytes."""
        if self.finished is not None:
            raise self.finished
        if self._notice.load(wire.NOTICE_OVER):
            raise errors.AgentLost("the agent ended this session: what it was copying did not arrive")

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        """Wait until a run has ended. Raises TimedOut, AgentLost, DataLost, and what the agent refused it for."""
        timeout = arguments.patience("timeout", timeout)
        end = None if timeout is None else time.monotonic() + timeout
        word, number = ticket.word, ticket.seq & _MASK
        if self.ended(word, ticket.seq):
            return
        self._pool.measures.begin_wait()
        try:
            while not self.ended(word, ticket.seq):
                self.check(ticket)
                left = SLICE if end is None else min(SLICE, end - time.monotonic())
                if left <= 0:
                    raise errors.TimedOut(f"the copies did not end in {timeout} s")
                if self._notice.load(wire.NOTICE_STARTED + word) != number:
                    self._notice.wait(wire.NOTICE_STARTED + word, number, left)
                else:
                    self._notice.wait(wire.NOTICE_RUNS + word, 0, left)
        finally:
            self._pool.measures.end_wait()

    def check(self, ticket: Ticket) -> None:
        """Raise what keeps a run from ending: AgentLost, DataLost, or what the agent refused it for."""
        self._alive()
        of = ticket.of
        self._pool.check_lost({s.region for s in of} if isinstance(of, Sequence) else of.regions)
        seq, error = self._refused.get(ticket.word, (0, None))
        if error is not None and seq == ticket.seq:
            raise error

    def check_slot(self, slot: int, programs: Sequence["Program"]) -> None:
        """Raise what keeps the copies that name a slot from being made."""
        self._alive()
        if (ticket := self.into.get(slot)) is not None and not self.ended(ticket.word, ticket.seq):
            self.check(ticket)
        for program in programs:
            if slot in program.slots:
                seq = self._program_seqs.get(program.number, 0)
                for n in (seq - 1, seq):
                    if n > 0:
                        self.check(Ticket(self, wire.run_word(program.number, n), n, program))

    def settle(self, slots: Collection[int]) -> None:
        """Wait a moment for runs that name these slots: the last slot is handed over just before its run ends."""
        for ticket in self._outstanding:
            steps = ticket.of if isinstance(ticket.of, Sequence) else ticket.of.steps
            if any(s.slot in slots for s in steps):
                with suppress(errors.EmaError):  # what goes on all the same is the agent's to refuse
                    self.wait(ticket, SETTLE)

    def refuse(self, word: int, seq: int, error: errors.EmaError) -> None:
        """The agent refused a run: it will never start."""
        self._refused[word] = (seq, error)

    def _alive(self) -> None:
        if self.finished is not None:
            raise self.finished
        self._pool.check_alive()

    def _over(self, ticket: Ticket) -> bool:
        refused = self._refused
        return self.ended(ticket.word, ticket.seq) or (
            bool(refused) and refused.get(ticket.word, (0, None))[0] == ticket.seq
        )

    def _admit(self, ticket: Ticket) -> None:
        self._alive()
        under_way = self._outstanding
        if under_way:
            under_way = [t for t in under_way if not self._over(t)]
        while under_way and (len(under_way) >= wire.OUTSTANDING or any(t.word == ticket.word for t in under_way)):
            first = next((t for t in under_way if t.word == ticket.word), under_way[0])
            try:
                self.wait(first)
            except errors.EmaError:
                if not self._over(first):
                    raise
            under_way = [t for t in under_way if not self._over(t)]
        under_way.append(ticket)
        self._outstanding = under_way
