"""The messages between a borrower's library and the agent, over one AF_UNIX SOCK_SEQPACKET connection.

One message is one packet: msgpack, a tagged array. Descriptors travel beside the packet that names them. Requests carry
an `id` that their answer repeats; `Start` and `Run` are one-way, so that a step costs one message. Everything a client
sends is hostile until checked: decoding is strict, and the agent checks every number against what the client was given.
"""

from typing import Final

import msgspec

VERSION: Final = 1
"""Raised when a change is not understood by the other side's older version."""

MAX_MESSAGE: Final = 64 * 1024
"""Bytes of one packet at most (the kernel refuses packets above about 212 KB)."""

MAX_DESCRIPTORS: Final = 4
"""Descriptors beside one packet at most."""

MAX_COPIES: Final = 1024
"""Copies of one program or run at most; a step that crosses chunks makes one copy of each."""

MAX_REGIONS: Final = 1024
MAX_PROGRAMS: Final = 64
MAX_WINDOWS: Final = 64

# --- the page that client and agent share: one group of words per slot ---

SLOT_WORDS: Final = 16
"""Words from one slot to the next: one cache line, so that two slots never share one."""
SLOT_FLAG: Final = 0
"""EMPTY or FULL. A fetch waits for EMPTY and leaves FULL; a store waits for FULL and leaves EMPTY."""
SLOT_COPIED: Final = 1
"""Position (1-based) in its program of the last copy that the agent finished with this slot."""
SLOT_USED: Final = 2
"""Position of the last use that the client finished."""
MAX_SLOTS: Final = 1024
EMPTY: Final = 0
FULL: Final = 1

# --- the page that only the agent writes ---

NOTICE_RUNS: Final = 0
"""First of the words that tell of runs under way: two for ad-hoc runs, then two per program."""
RUN_WORDS: Final = 2 * (MAX_PROGRAMS + 1)
NOTICE_STARTED: Final = NOTICE_RUNS + RUN_WORDS
"""First of the words that hold the number of the run started last: a run has ended when its own number stands here and
its word in NOTICE_RUNS is 0."""
NOTICE_REGIONS: Final = NOTICE_STARTED + RUN_WORDS
"""First of the words that count, per region, how often chunks of it were dropped."""
NOTICE_OVER: Final = NOTICE_REGIONS + MAX_REGIONS
"""1 once the session is over: from then on the agent hands slots over in the client's place, so that what is queued
passes. Whoever saw a slot handed over, or a run end, looks here before it believes it."""
NOTICE_WORDS: Final = NOTICE_OVER + 1
OUTSTANDING: Final = 2
"""Runs that one client may have under way at once. One more is refused: it would block the agent's launching thread."""


def run_word(program: int, seq: int) -> int:
    """The notice word of this run: 1 while it is under way. Ad-hoc runs are program -1; two runs alternate."""
    return NOTICE_RUNS + 2 * (program + 1) + (seq & 1)


MAX_BYTES: Final = 1 << 56
"""Amounts are below this many bytes."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, forbid_unknown_fields=True):
    """Base of every message.

    More fields than this version knows are refused, except in what tells two versions apart (`Hello`, `Welcome`,
    `Refused`).
    """


class CopyStep(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One step: `size` bytes between a region and a slot. It waits for the slot, copies, and hands the slot over."""

    region: int
    at: int
    """Offset in the region, in bytes."""
    size: int
    slot: int
    slot_at: int = 0
    """Offset in the slot, in bytes."""


# --- from the client ---


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message. `gpu` is the client's own GPU: a UUID, an index in decimal, or empty where there is but one."""

    version: int
    gpu: str = ""
    name: str = ""
    pool: str = ""


class OpenWindow(Message, frozen=True):
    """A window of the client's own GPU memory, whose descriptor comes along. Slots are numbered from `first`."""

    id: int
    window: int
    first: int
    slots: int
    slot_bytes: int


class CloseWindow(Message, frozen=True):
    """Give a window up; refused while a program uses it."""

    id: int
    window: int


class GrowRegion(Message, frozen=True):
    """Make a region, or make it `size` bytes large; answered when all is granted or `timeout` seconds have passed."""

    id: int
    region: int
    size: int
    droppable: bool
    timeout: float


class RenewRegion(Message, frozen=True):
    """Give new memory (zeros) for what was dropped of a region; answered like GrowRegion."""

    id: int
    region: int
    timeout: float


class ShrinkRegion(Message, frozen=True):
    """Cut a region to `size` bytes; 0 closes it."""

    id: int
    region: int
    size: int


class AskDropped(Message, frozen=True):
    """Which chunks of a region are gone."""

    id: int
    region: int


class OpenProgram(Message, frozen=True):
    """Register a program, to be started by `Start`."""

    id: int
    program: int
    store: bool
    """True: slots to regions (stores). False: regions to slots (fetches)."""
    steps: list[CopyStep]


class CloseProgram(Message, frozen=True):
    """Give a program up; waits until its runs have ended."""

    id: int
    program: int


class Start(Message, frozen=True):
    """Start a program. One-way. `seq` counts up from 1 per program number; one seen before is ignored."""

    program: int
    seq: int


class Run(Message, frozen=True):
    """Copies without a program. One-way. `seq` counts up from 1; one seen before is ignored."""

    seq: int
    store: bool
    steps: list[CopyStep]


class GrowShare(Message, frozen=True):
    """The client is about to use `size` bytes of its own GPU in all: answered when they are free for it."""

    id: int
    size: int
    timeout: float


class ShareIs(Message, frozen=True):
    """The client's share has `size` bytes mapped by now. One-way."""

    size: int


class Report(Message, frozen=True):
    """What the client measured since its last report, for the metrics. One-way."""

    waited: float
    """Seconds that it waited for fetches."""
    stepped: float
    """Seconds of its steps in all."""
    steps: int


class Goodbye(Message, frozen=True):
    """The client ends in good order; everything of it is given back, then the connection is closed."""


# --- from the agent ---


class Welcome(Message, frozen=True, forbid_unknown_fields=False):
    """Answer to Hello. Beside it: the shared page, the notice page and, where the driver has them, a guest session."""

    version: int
    driver: str
    lease: str
    gpu: str
    pool: str
    chunk: int
    """Bytes of a chunk."""
    granularity: int
    """Window sizes are multiples of this many bytes."""
    limit: int
    guaranteed: int
    rate: int
    """Bytes per second of the fastest verified path to the client's GPU; 0 where there is none."""
    guest: bool


class Done(Message, frozen=True):
    """The request with this `id` was carried out."""

    id: int
    value: int = 0


class Refused(Message, frozen=True, forbid_unknown_fields=False):
    """The request with this `id` (0: the one-way message or packet just received) was not carried out.

    `kind` is one of `Kinds`; `field`, `value` and `expected` are set for bad input.
    """

    id: int
    kind: str
    message: str
    field: str = ""
    value: str = ""
    expected: str = ""
    position: int = -1
    """For `pool-full`: the place in the queue when time ran out (0 was next)."""
    word: int = -1
    """For a refused Start or Run: the notice word of the run that does not take place, and its number."""
    seq: int = 0


class Queued(Message, frozen=True):
    """The request with this `id` waits: place in the queue (0 is next) and seconds until it is answered in any case."""

    id: int
    position: int
    deadline: float


class Moved(Message, frozen=True):
    """Bytes of a region came, went or (`size`, if not 0) changed place.

    `rate`: bytes per second of one fetch of the whole region from now on, its copies one after the other. 0: a path is
    barred.
    """

    region: int
    size: int
    rate: int


class Dropped(Message, frozen=True):
    """These chunks (indices) of a region are gone. An answer to AskDropped (`id`) or by itself (`id` 0)."""

    id: int
    region: int
    chunks: list[int]
    more: bool = False
    """Another page follows."""


class Lost(Message, frozen=True):
    """These chunks of a region were lost with their GPU: the client must not use them."""

    region: int
    chunks: list[int]
    cause: str


class Kinds:
    """Values of `Refused.kind`."""

    BAD = "bad-input"
    VERSION = "version"
    FULL = "pool-full"
    LIMIT = "limit"
    BUSY = "busy"
    IN_USE = "in-use"
    MEMORY = "out-of-memory"
    GONE = "gone"
    INTERNAL = "internal"


ClientMessage = (
    Hello
    | OpenWindow
    | CloseWindow
    | GrowRegion
    | RenewRegion
    | ShrinkRegion
    | AskDropped
    | OpenProgram
    | CloseProgram
    | Start
    | Run
    | GrowShare
    | ShareIs
    | Report
    | Goodbye
)
AgentMessage = Welcome | Done | Refused | Queued | Moved | Dropped | Lost

_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(ClientMessage)
_from_agent = msgspec.msgpack.Decoder(AgentMessage)
encode = _encoder.encode
"""Bytes of a message."""


def decode_client(packet: bytes) -> ClientMessage:
    """A message from a client. Raises msgspec.DecodeError or ValidationError, which say what is wrong with it."""
    return _from_client.decode(packet)


def decode_agent(packet: bytes) -> AgentMessage:
    """A message from the agent. Raises msgspec.DecodeError."""
    return _from_agent.decode(packet)
