"""Messages between a session and the device process: msgpack arrays over a SEQPACKET socket, descriptors beside them.

A body too large for one message travels in a memory file: the message is then `IN_FILE` alone and the last descriptor
holds the body. Requests without `seq` get no reply; one that is malformed ends the session that sent it.
"""

import array
import os
import socket
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ema_driver import shared_memory
from ema_driver.sim.faults import Fault

VERSION = 2
IN_FILE = b"\x00"
INLINE_LIMIT = 64 << 10
"""Bytes; the kernel refuses messages above about 212 KB."""
BODY_LIMIT = 16 << 20
MAX_FDS = 64
RESERVE_LIMIT = 100_000
"""Address ranges that one call reserves."""
CREATE_LIMIT = 512
"""Pieces of memory that one call creates: others' calls wait for as long as that takes."""
ARMED = -1
"""Last word of a page file: not 0 while a stream may wait for a word of it, so that `store` rings the doorbell."""
SLEPT = -2
"""The word before it: not 0 once a thread has slept on any word of the page, so that `fill` wakes each."""
HIDDEN_WORDS = 2
"""Words at the end of a page file that are not the page's users'."""
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class WaitOp(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """`Wait` on a page by its number."""

    page: Natural
    index: Natural
    value: Word


class WriteOp(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """`Write` on a page by its number."""

    page: Natural
    index: Natural
    value: Word


class CopyOp(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """`Copy`."""

    target: Natural
    source: Natural
    size: Natural


WireOp = WaitOp | WriteOp | CopyOp


class Launch(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Append a graph to its stream. No reply."""

    graph: Natural


class Enqueue(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Append operations. No reply."""

    stream: Natural
    ops: tuple[WireOp, ...]


class CloseGraph(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """No reply."""

    graph: Natural


class ClosePage(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """No reply."""

    page: Natural


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """→ the server's configuration."""

    seq: Natural
    version: int


class Devices(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """→ list of `Device`."""

    seq: Natural


class Links(msgspec.Struct, array_like=True, frozen=True, tag=12):
    """→ list of `Link`."""

    seq: Natural


class Memory(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """→ place → `MemoryInfo`."""

    seq: Natural


class Create(msgspec.Struct, array_like=True, frozen=True, tag=14):
    """`count` pieces of memory, all or none → list of handles."""

    seq: Natural
    place: str
    size: Natural
    count: Annotated[int, msgspec.Meta(ge=1, le=CREATE_LIMIT)]


class Export(msgspec.Struct, array_like=True, frozen=True, tag=15):
    """→ nothing, with one descriptor."""

    seq: Natural
    handle: Natural


class Adopt(msgspec.Struct, array_like=True, frozen=True, tag=16):
    """With one descriptor → (handle, place)."""

    seq: Natural
    size: Natural


class Release(msgspec.Struct, array_like=True, frozen=True, tag=17):
    """→ nothing."""

    seq: Natural
    handles: tuple[Natural, ...]


class Reserve(msgspec.Struct, array_like=True, frozen=True, tag=18):
    """`count` ranges, all or none → list of addresses."""

    seq: Natural
    size: Natural
    count: Annotated[int, msgspec.Meta(ge=0, le=RESERVE_LIMIT)]


class Unreserve(msgspec.Struct, array_like=True, frozen=True, tag=19):
    """→ nothing."""

    seq: Natural
    addresses: tuple[Natural, ...]


class Map(msgspec.Struct, array_like=True, frozen=True, tag=20):
    """→ nothing."""

    seq: Natural
    pairs: tuple[tuple[Natural, Natural], ...]


class Unmap(msgspec.Struct, array_like=True, frozen=True, tag=21):
    """→ nothing."""

    seq: Natural
    addresses: tuple[Natural, ...]


class Open(msgspec.Struct, array_like=True, frozen=True, tag=22):
    """What is mapped from `address` on → list of (offset in memory, bytes), one descriptor each."""

    seq: Natural
    address: Natural
    size: Natural


class RegisterPage(msgspec.Struct, array_like=True, frozen=True, tag=23):
    """With one descriptor → page number, with the page's doorbell."""

    seq: Natural
    count: Natural


class OpenStream(msgspec.Struct, array_like=True, frozen=True, tag=24):
    """→ stream."""

    seq: Natural
    device: str


class CloseStream(msgspec.Struct, array_like=True, frozen=True, tag=25):
    """→ nothing, once no byte moves any more."""

    seq: Natural
    stream: Natural


class Instantiate(msgspec.Struct, array_like=True, frozen=True, tag=26):
    """→ graph."""

    seq: Natural
    stream: Natural
    ops: tuple[WireOp, ...]


class Synchronize(msgspec.Struct, array_like=True, frozen=True, tag=27):
    """→ whether all that was queued has run within `timeout` seconds."""

    seq: Natural
    stream: Natural
    timeout: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Health(msgspec.Struct, array_like=True, frozen=True, tag=28):
    """→ list of `HealthEvent`."""

    seq: Natural


class Guest(msgspec.Struct, array_like=True, frozen=True, tag=29):
    """→ nothing, with the socket of a new session."""

    seq: Natural
    device: str


class Inject(msgspec.Struct, array_like=True, frozen=True, tag=30):
    """→ nothing."""

    seq: Natural
    fault: Fault


class Clear(msgspec.Struct, array_like=True, frozen=True, tag=31):
    """→ nothing."""

    seq: Natural
    fault: Fault


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag=32):
    """→ the end of the process."""

    seq: Natural


class Bye(msgspec.Struct, array_like=True, frozen=True, tag=33):
    """→ the end of the session, once all it held is given back."""

    seq: Natural


Call = (
    Bye | Hello | Devices | Links | Memory | Create | Export | Adopt | Release | Reserve | Unreserve | Map | Unmap
    | Open | RegisterPage | OpenStream | CloseStream | Instantiate | Synchronize | Health | Guest | Inject | Clear
    | Shutdown
)  # fmt: skip
Message = Launch | Enqueue | CloseGraph | ClosePage | Call


class Reply(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A call's result."""

    seq: int
    result: Any = None


class Failure(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A call's error: the name of a class of `ema_driver.errors`, and its arguments."""

    seq: int
    kind: str
    arguments: tuple[Any, ...]


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Message).decode
decode_answer = msgspec.msgpack.Decoder(Reply | Failure).decode


def send(link: socket.socket, body: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors, which stay the caller's. Raises OSError."""
    if len(body) <= INLINE_LIMIT:
        if fds:
            socket.send_fds(link, [body], list(fds))
        else:
            link.send(body)
        return
    file = shared_memory.sealed_memory("ema-message", len(body))
    try:
        os.pwrite(file, body, 0)
        socket.send_fds(link, [IN_FILE], [*fds, file])
    finally:
        os.close(file)


def receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors (close-on-exec, the caller's); empty bytes at the end. Raises OSError."""
    body, ancillary, _, _ = link.recvmsg(INLINE_LIMIT, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    if not ancillary:
        return body, []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    held = list(fds)
    if body == IN_FILE and held:
        file = held.pop()
        try:
            # Only a memory file: reading anything else could block whoever reads.
            body = (
                os.pread(file, min(os.fstat(file).st_size, BODY_LIMIT), 0) if shared_memory.is_sealed(file) else b"\xc1"
            )
        finally:
            os.close(file)
    return body, held
