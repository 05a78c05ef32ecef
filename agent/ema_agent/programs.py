"""Programs: a client's copies, checked and made ready once, started with one message per step of its model.

A program is instantiated twice on the client's stream, because two runs of it may be under way: the next step's first
copies are issued during the current step. Starting one is a look-up, two word accesses and one launch; nothing is
allocated, nothing is mapped and nothing is done per chunk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ema_agent.lease import Chunk, Lease, State
from ema_core import wire
from ema_core.ids import Place
from ema_core.wire import CopyStep, Kinds
from ema_driver.errors import DriverError
from ema_driver.protocol import Address, Copy, Graph, Handle, Op, Stream, Wait, Words, Write


class Refusal(Exception):
    """A client's message cannot be carried out; becomes a `Refused` answer."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        field: str = "",
        value: object = "",
        expected: str = "",
        position: int = -1,
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.field, self.expected, self.position = kind, message, field, expected, position
        self.value = str(value)
        self.run = (-1, 0)
        """For a Start or Run: its notice word and number."""

    @classmethod
    def bad(cls, field: str, value: object, expected: str) -> "Refusal":
        """Bad input: names the field, the value and what would be right."""
        return cls(Kinds.BAD, f"{field} is {value}; expected {expected}", field=field, value=value, expected=expected)


@dataclass(slots=True)
class Window:
    """A client's own GPU memory, imported: slots `first` … `first + slots - 1`."""

    number: int
    first: int
    slots: int
    slot_bytes: int
    handle: Handle
    address: Address


@dataclass(frozen=True, slots=True)
class Load:
    """What a run without a program copies."""

    steps: Sequence[CopyStep]
    chunks: Sequence[Chunk]


@dataclass(slots=True)
class Program:
    """Copies made ready. `graphs` holds an instance for even and one for odd sequence numbers, once there are any."""

    number: int
    store: bool
    steps: Sequence[CopyStep]
    chunks: list[Chunk]
    graphs: list[Graph] = field(default_factory=list)
    seq: int = 0
    bytes_by_place: Mapping[Place, int] = field(default_factory=dict)
    version: int = -1
    """The lease's version that `bytes_by_place` was counted at."""
    lost: bool = False
    """Some of its chunks are lost: a run would wait at a gate that opens no more, and all copies behind it."""

    @property
    def size(self) -> int:
        """Bytes of one run."""
        return sum(s.size for s in self.steps)

    def sizes(self, lease: Lease) -> Mapping[Place, int]:
        """Bytes of one run by lender, spread evenly over the program's chunks; counted anew after chunks moved."""
        if self.version != lease.version:
            part = self.size // max(1, len(self.chunks))
            sizes: dict[Place, int] = {}
            for chunk in self.chunks:
                sizes[chunk.place] = sizes.get(chunk.place, 0) + part
            self.bytes_by_place, self.version = sizes, lease.version
        return self.bytes_by_place


class Copies:
    """One client's streams, windows and programs."""

    def __init__(
        self, lease: Lease, fetch: Stream, store: Stream, *, shared: Words, notice: Words, private: Words, most: int
    ) -> None:
        """`most`: copies of one run without a program."""
        self.lease, self._most = lease, min(most, wire.MAX_COPIES)
        self.streams = {False: fetch, True: store}
        self.shared = shared
        self.notice = notice
        self._private = private
        """Which runs are under way, where the client cannot write."""
        self.windows: dict[int, Window] = {}
        self.programs: dict[int, Program] = {}
        self.run_seq = 0
        self._slots: dict[int, tuple[int, int]] = {}
        """Slot → its address and size."""
        self._under_way: dict[int, Load | Program] = {}
        """Run word → what the run that was launched last under it copies."""

    # --- windows ---

    def check_window(self, message: wire.OpenWindow, granularity: int) -> None:
        """Refuse a window that cannot be."""
        bad = Refusal.bad
        if message.window in self.windows or not 0 <= message.window < wire.MAX_WINDOWS:
            raise bad("window", message.window, f"a new number below {wire.MAX_WINDOWS}")
        if message.slots < 1 or message.first < 0 or message.first + message.slots > wire.MAX_SLOTS:
            raise bad("slots", f"{message.first}+{message.slots}", f"at least one, below {wire.MAX_SLOTS} in all")
        if any(s in self._slots for s in range(message.first, message.first + message.slots)):
            raise bad("first", message.first, "slots that no other window has")
        size = message.slots * message.slot_bytes
        if message.slot_bytes < 1 or size % granularity or size > wire.MAX_BYTES:
            expected = f"slots × slot_bytes a multiple of {granularity}, at most {wire.MAX_BYTES}"
            raise bad("slot_bytes", message.slot_bytes, expected)

    def add_window(self, window: Window) -> None:
        """Enter an imported window."""
        self.windows[window.number] = window
        for i in range(window.slots):
            self._slots[window.first + i] = (int(window.address) + i * window.slot_bytes, window.slot_bytes)

    def remove_window(self, number: int) -> Window:
        """Take a window out. Raises Refusal while a program or a run uses it."""
        window = self.windows.get(number)
        if window is None:
            raise Refusal.bad("window", number, "a window that is open")
        slots = range(window.first, window.first + window.slots)
        users = [p.number for p in self.programs.values() if any(s.slot in slots for s in p.steps)]
        self._forget_ended()
        if users or any(s.slot in slots for run in self._under_way.values() for s in run.steps):
            raise Refusal(Kinds.IN_USE, f"window {number} is in use by {users or 'a run under way'}: end that first")
        del self.windows[number]
        for s in slots:
            del self._slots[s]
        return window

    # --- programs ---

    def open_program(self, message: wire.OpenProgram) -> tuple[Program, Callable[[], None]]:
        """Check and enter a program; and what makes it ready, to be called on a thread of its own. Raises Refusal.

        A driver may hold an instantiation up until copies queued elsewhere go on, so the loop does not make it.
        """
        if message.program in self.programs or not 0 <= message.program < wire.MAX_PROGRAMS:
            raise Refusal.bad("program", message.program, f"a new number below {wire.MAX_PROGRAMS}")
        for step in message.steps:
            region = self.lease.regions.get(step.region)
            if region is not None and region.droppable:
                raise Refusal.bad("steps.region", step.region, "a region that is not droppable (use a run)")
        chunks: list[Chunk] = []
        ops = self._ops(message.steps, message.store, chunks, wire.MAX_COPIES)
        unique = list(dict.fromkeys(chunks))
        program = Program(message.program, message.store, tuple(message.steps), unique)
        self.programs[program.number] = program

        def make_ready() -> None:
            stream = self.streams[message.store]
            made: list[Graph] = []
            try:
                for word in (wire.run_word(message.program, parity) for parity in (0, 1)):
                    made += [stream.instantiate([*ops, *self._end(word)])]
            except DriverError:
                for graph in made:
                    graph.close()
                raise
            program.graphs += made

        return program, make_ready

    def forget_program(self, program: Program) -> None:
        """It could not be made ready."""
        del self.programs[program.number]

    def close_program(self, number: int) -> None:
        """Forget a program whose runs have ended. Raises Refusal."""
        program = self.programs.get(number)
        if program is None:
            raise Refusal.bad("program", number, "a program that is open")
        self._check_ready(program)
        if any(self._private.load(wire.run_word(number, i)) for i in (0, 1)):
            raise Refusal(Kinds.IN_USE, f"program {number} is under way: wait for its end first")
        del self.programs[number]
        self.lease.recent.pop(number, None)
        for graph in program.graphs:
            graph.close()

    def due(self, message: wire.Start) -> Program | None:
        """The program to launch, or None if this start was seen before. Raises Refusal (unknown, too many)."""
        program = self.programs.get(message.program)
        if program is None:
            raise Refusal.bad("program", message.program, "a program that is open")
        if message.seq <= program.seq:
            return None
        self._check_ready(program)
        _check_there(program)
        self._room(wire.run_word(message.program, message.seq), message.seq, program)
        program.seq = message.seq
        return program

    @staticmethod
    def _check_ready(program: Program) -> None:
        if not program.graphs:
            raise Refusal(Kinds.BUSY, f"program {program.number} is being made ready: wait for that answer first")

    def launch(self, program: Program, seq: int, now: float) -> None:
        """Start a run that `due` let through. Raises Refusal (lost meanwhile), NotMapped with nothing queued."""
        _check_there(program)
        program.graphs[seq & 1].launch()
        self.lease.recent[program.number] = (now, program.chunks)
        self.lease.last_used = now

    def run(self, message: wire.Run) -> tuple[Load, Callable[[float], None]] | None:
        """Check copies without a program: what they are, and what queues them; None if seen before. Raises Refusal.

        What queues them raises Refusal (lost meanwhile), or NotMapped with nothing queued.
        """
        if message.seq <= self.run_seq:
            return None
        chunks: list[Chunk] = []
        ops = self._ops(message.steps, message.store, chunks, self._most)
        word = wire.run_word(-1, message.seq)
        load = Load(message.steps, chunks)
        self._room(word, message.seq, load)
        self.run_seq = message.seq

        def queue(now: float) -> None:
            if any(c.state is State.LOST for c in chunks):
                raise Refusal(Kinds.GONE, "the run copies bytes that are lost")
            self.streams[message.store].enqueue([*ops, *self._end(word)])
            for c in chunks:
                c.last_used = now
            self.lease.last_used = now

        return load, queue

    def withdraw(self, message: wire.Start | wire.Run) -> None:
        """A run that was let through is not queued after all. Its client is told, not shown an end by the notice."""
        word = wire.run_word(message.program if isinstance(message, wire.Start) else -1, message.seq)
        self._private.store(word, 0)
        self._under_way.pop(word, None)

    def busy(self, chunks: Iterable[Chunk]) -> bool:
        """Whether a run under way copies any of these chunks."""
        self._forget_ended()
        wanted = set(chunks)
        return any(not wanted.isdisjoint(run.chunks) for run in self._under_way.values())

    def users_of(self, chunks: Iterable[Chunk]) -> list[int]:
        """Programs that copy any of these chunks."""
        wanted = set(chunks)
        return [p.number for p in self.programs.values() if not wanted.isdisjoint(p.chunks)]

    def lose(self) -> None:
        """Chunks of this client are lost: programs that copy them start no more."""
        for program in self.programs.values():
            program.lost = any(c.state is State.LOST for c in program.chunks)

    # --- inside ---

    def _forget_ended(self) -> None:
        load = self._private.load
        for word in [w for w in self._under_way if not load(w)]:
            del self._under_way[word]

    def _room(self, word: int, seq: int, run: "Load | Program") -> None:
        self._forget_ended()
        if len(self._under_way) >= wire.OUTSTANDING or word in self._under_way:
            raise Refusal(Kinds.BUSY, f"{wire.OUTSTANDING} runs are under way: wait for the end of one first")
        self._private.store(word, 1)
        self._under_way[word] = run
        # In this order: who sees the run's number and then its word at 0 knows that it has ended.
        self.notice.store(word, 1)
        self.notice.store(wire.NOTICE_STARTED + word, seq & 0xFFFFFFFF)

    def _end(self, word: int) -> list[Op]:
        return [Write(self._private, word, 0), Write(self.notice, word, 0)]

    def _ops(self, steps: Sequence[CopyStep], store: bool, chunks: list[Chunk], most: int) -> list[Op]:
        ops: list[Op] = []
        before, after = (wire.FULL, wire.EMPTY) if store else (wire.EMPTY, wire.FULL)
        for position, step in enumerate(steps, 1):
            slot = self._slots.get(step.slot)
            if slot is None:
                raise Refusal.bad(f"steps[{position - 1}].slot", step.slot, "a slot of an open window")
            address, slot_bytes = slot
            if step.size < 1 or step.slot_at < 0 or step.slot_at + step.size > slot_bytes:
                raise Refusal.bad(
                    f"steps[{position - 1}].size",
                    f"{step.slot_at}+{step.size}",
                    f"within the slot's {slot_bytes} bytes",
                )
            word = step.slot * wire.SLOT_WORDS
            ops.append(Wait(self.shared, word + wire.SLOT_FLAG, before))
            if len(chunks) + step.size // self.lease.chunk > most:
                raise Refusal.bad("steps", "more copies", f"at most {most} copies, one per chunk and step")
            for chunk, offset, size, done in self._pieces(step, position):
                chunks.append(chunk)
                there, here = int(chunk.address) + offset, address + step.slot_at + done
                copy = Copy(there, here, size) if store else Copy(here, there, size)
                ops += chunk.gate.around(copy, store=store)
            ops.append(Write(self.shared, word + wire.SLOT_COPIED, position))
            ops.append(Write(self.shared, word + wire.SLOT_FLAG, after))
        return ops

    def _pieces(self, step: CopyStep, position: int) -> Iterable[tuple[Chunk, int, int, int]]:
        name = f"steps[{position - 1}]"
        region = self.lease.regions.get(step.region)
        if region is None:
            raise Refusal.bad(f"{name}.region", step.region, "a region that is open")
        length = self.lease.chunk
        end = step.at + step.size
        if step.at < 0 or end > region.usable * length:
            raise Refusal.bad(f"{name}.at", f"{step.at}+{step.size}", f"within the {region.usable * length} bytes")
        at = step.at
        while at < end:
            index, offset = divmod(at, length)
            size = min(length - offset, end - at)
            chunk = region.chunks[index]
            if chunk is None or chunk.state is State.LOST or index in region.holes:
                raise Refusal(
                    Kinds.GONE, f"chunk {index} of region {region.number} is {'lost' if chunk else 'not granted'}"
                )
            yield chunk, offset, size, at - step.at
            at += size


def _check_there(program: Program) -> None:
    if program.lost:
        raise Refusal(Kinds.GONE, f"program {program.number} copies bytes that are lost")
