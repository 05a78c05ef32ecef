"""The one interface to memory: what EMA needs of a GPU driver, and no more.

Two implementations pass one contract suite (`tests/driver`): `sim`, simulated GPUs with real bytes and descriptors, and
the CUDA driver. The words are CUDA's: physical memory is *created* at a place and named by a *handle*; an *address*
range is reserved and memory is *mapped* into it; *streams* run operations in order without the caller's CPU.

Rules that every implementation keeps:

- A handle can be exported as a POSIX descriptor and imported by another process. Physical memory is free again only
  when every handle, every mapping and every descriptor of it, in every process, is gone.
- What is mapped behind an address may change while operations that name the address are queued: each operation uses
  what is mapped when it runs. One that runs while nothing is mapped there is a fault: the session is lost
  (`ContextLost`).
- Calls that take sequences do all of it or, on an error, undo what they did before they raise.
- No call blocks behind a stream's queued operations, except those that say so.
- A session may be used from several threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import NewType, Protocol, Self, runtime_checkable

from ema_core.ids import GpuId, Place

Address = NewType("Address", int)
"""Start of a reserved address range in one session."""

WORD_BYTES = 4
"""Size of one word of a `Words` page."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `index` is today's enumeration order and nothing to rely on; `id` is the UUID."""

    id: GpuId
    index: int
    product: str
    total: int
    """Bytes."""
    numa: int | None = None
    """NUMA node, or None when the driver does not say or says nonsense."""
    pci: str = ""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of one place. `free + used + reserved == total`."""

    total: int
    reserved: int
    used: int
    free: int


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes from `source` to `target`, claimed by the driver and not yet verified."""

    source: Place
    target: Place
    kind: str
    """`nvlink`, `pcie` or `local`."""
    rate: int
    """Bytes per second, one way."""


class HealthKind(StrEnum):
    """What a device reports about itself."""

    XID = "xid"
    LOST = "lost"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """Something happened to a device. `code` is the XID number, else 0."""

    gpu: GpuId
    kind: HealthKind
    code: int = 0
    message: str = ""


class Handle(Protocol):
    """A hold on physical memory."""

    @property
    def place(self) -> Place:
        """Where the memory is."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


class Words(Protocol):
    """A page of 32-bit words, sealed against resizing, that streams and host code of several processes share."""

    @property
    def count(self) -> int:
        """How many words."""
        ...

    def load(self, index: int) -> int:
        """The word's value now."""
        ...

    def store(self, index: int, value: int) -> None:
        """Write the word, with a full memory fence behind it, and let go every stream and thread that waits for it."""
        ...

    def fill(self, indices: Sequence[int], value: int) -> None:
        """`store` to many words with one fence and one wake-up."""
        ...

    def wait(self, index: int, value: int, timeout: float) -> bool:
        """Block this thread, without spinning, until the word equals `value`; False after `timeout` seconds."""
        ...

    def fileno(self) -> int:
        """The page's descriptor, to be sent to another process. It stays this object's."""
        ...

    def close(self) -> None:
        """Give the page up. Twice is harmless. Streams must be done with it."""
        ...


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold the stream until the word equals `value`."""

    page: Words
    index: int
    value: int


@dataclass(frozen=True, slots=True)
class Write:
    """Set the word to `value`; everything earlier in the stream is visible to whoever sees it."""

    page: Words
    index: int
    value: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `size` bytes between mapped addresses (with offsets already added)."""

    target: int
    source: int
    size: int


Op = Wait | Write | Copy


class Graph(Protocol):
    """Operations made ready once, started many times with one cheap call."""

    def launch(self) -> None:
        """Append the operations to the stream that the graph was made for. Allocates nothing.

        Never blocks while few launches are outstanding; a GPU's queue has an end, though a far one. Raises NotMapped
        where the driver has to look at the addresses when copies are queued, and nothing is mapped at one just then.
        """
        ...

    def close(self) -> None:
        """Give the graph up once it runs no more. Twice is harmless."""
        ...


class Stream(Protocol):
    """A queue of operations that run in order, without the CPU of whoever queued them."""

    def enqueue(self, ops: Sequence[Op]) -> None:
        """Append operations. Raises NotMapped like `Graph.launch`."""
        ...

    def instantiate(self, ops: Sequence[Op]) -> Graph:
        """Make operations ready to be launched on this stream, again and again.

        Copies name addresses with something mapped behind them; what that is may change before each launch. Raises
        NotMapped like `Graph.launch`.
        """
        ...

    def synchronize(self, timeout: float) -> bool:
        """Block, without spinning, until all that was queued before has run; False after `timeout` seconds.

        Raises ContextLost if the session is lost. Raises DeviceLost, now and ever after, if an operation of this stream
        met a lost device: what was queued behind it is dropped, other streams of the session go on.
        """
        ...

    def done(self) -> bool:
        """Whether everything queued so far has run. Does not block. Raises like `synchronize`."""
        ...

    def close(self) -> bool:
        """Give the stream up, with nothing queued: let what is queued pass first. Twice is harmless.

        `sim` drops what is still queued. CUDA cannot: there it still runs when its waits let it. True if nothing of it
        can run any more.
        """
        ...


class MemoryDriver(Protocol):
    """A session with the GPUs of this node. Closing it gives everything back that it created."""

    most_copies: int
    """Copies of one run that may wait on a stream, twice, without blocking whoever queues more."""

    name: str
    """`sim` or `cuda`."""

    def devices(self) -> Sequence[Device]:
        """The GPUs this session can see."""
        ...

    def links(self) -> Sequence[Link]:
        """Every ordered pair of places (GPUs and `HOST`) that the driver claims can copy to each other."""
        ...

    def memory(self) -> Mapping[Place, MemoryInfo]:
        """Bytes of every visible GPU that answers, and of `HOST`. One that does not answer is left out."""
        ...

    def granularity(self, place: Place) -> int:
        """Sizes at this place are multiples of this many bytes."""
        ...

    def create(self, place: Place, size: int) -> Handle:
        """Take physical memory, zeroed. Raises OutOfMemory, DeviceLost, InvalidUse (size)."""
        ...

    def create_many(self, place: Place, size: int, count: int) -> Sequence[Handle]:
        """`count` (0 or more) pieces of `size` bytes each, zeroed: all, or none and what `create` raises."""
        ...

    def export(self, handle: Handle) -> int:
        """A new descriptor of the memory, close-on-exec; the caller closes it."""
        ...

    def adopt(self, fd: int, size: int) -> Handle:
        """Import memory of `size` bytes (verified) from a descriptor, which stays the caller's to close.

        Raises InvalidUse if it is no memory of this driver or of another size.
        """
        ...

    def release(self, handles: Sequence[Handle]) -> None:
        """Give handles up. Mappings of them stay valid until they are unmapped."""
        ...

    def reserve(self, size: int) -> Address:
        """Reserve an address range with nothing mapped in it."""
        ...

    def reserve_many(self, size: int, count: int) -> Sequence[Address]:
        """`count` (0 or more) ranges of `size` bytes each, all or none; each is given up by itself."""
        ...

    def unreserve(self, addresses: Sequence[Address]) -> None:
        """Give address ranges up; nothing may be mapped in them."""
        ...

    def map(self, pairs: Sequence[tuple[Address, Handle]]) -> None:
        """Map each handle's whole memory at the address, readable and writable by every visible GPU."""
        ...

    def unmap(self, addresses: Sequence[Address]) -> None:
        """Unmap what is at each address. The caller is certain that no operation touches it meanwhile."""
        ...

    def words(self, count: int) -> Words:
        """A new page of at least `count` words, all zero."""
        ...

    def adopt_words(self, fd: int, count: int) -> Words:
        """A page that another process made; refused unless it is sealed against shrinking and large enough."""
        ...

    def stream(self, device: GpuId) -> Stream:
        """A new stream on that GPU. Raises InvalidUse: no such GPU, or no stream left that runs by itself."""
        ...

    def read(self, address: int, size: int) -> bytes:
        """Bytes from a mapped address, now. For setup, checks and tests; never on a step's path."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Bytes to a mapped address, now. For setup, checks and tests; never on a step's path."""
        ...

    def zero(self, address: int, size: int) -> None:
        """Zero bytes at a mapped address, now, at the speed of the memory or of the link to it."""
        ...

    def health(self) -> Sequence[HealthEvent]:
        """What devices reported since the last call. Does not block."""
        ...

    def guest(self, device: GpuId) -> int:
        """A descriptor that opens a session which sees only `device`, for a borrower's process; the caller closes it.

        Raises InvalidUse where borrowers reach their GPU by themselves (the CUDA driver).
        """
        ...

    def close(self) -> None:
        """End the session. Twice is harmless."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class CpuVisible(Protocol):
    """A driver whose memory the CPU can map: simulated GPUs, where the client's CPU plays the kernels."""

    def view(self, address: int, size: int) -> memoryview:
        """The bytes mapped at an address now, writable, in this process. Drop it before the memory is unmapped."""
        ...


@runtime_checkable
class GpuVisible(Protocol):
    """A page of words that kernels can read: those of real GPUs."""

    @property
    def pointer(self) -> int:
        """Where kernels find word 0."""
        ...


@runtime_checkable
class StreamOrdered(Protocol):
    """A driver that can put waits and writes on a stream of the caller's own, among its kernels: real GPUs."""

    def wait_on(self, stream: int, page: Words, index: int, value: int) -> None:
        """Hold the caller's stream (a raw CUstream of a visible GPU) until the word equals `value`."""
        ...

    def write_on(self, stream: int, page: Words, index: int, value: int) -> None:
        """Set the word to `value` when the caller's stream gets there; its earlier writes are visible by then."""
        ...
