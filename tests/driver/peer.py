"""Another process in the contract suite: `peer.py ROLE FD DRIVER ENDPOINT`, commands over the socket FD."""

import mmap
import os
import random
import socket
import sys
import time
from collections.abc import Callable

from ema_core.ids import GpuId, Place
from ema_driver import open_guest, open_node
from ema_driver.errors import ContextLost
from ema_driver.protocol import Address, Copy, MemoryDriver, Wait, Words, Write

EMPTY, FULL = 0, 1
BLOCK = 8


def pattern(chunk: int, version: int, size: int) -> bytes:
    """What chunk number `chunk` holds in its `version`-th content."""
    return (chunk.to_bytes(4, "little") + version.to_bytes(4, "little")) * (size // BLOCK)


class Link:
    """The socket to the test."""

    def __init__(self, fd: int) -> None:
        self._link = socket.socket(fileno=fd)

    def tell(self, text: str, *fds: int) -> None:
        socket.send_fds(self._link, [text.encode()], list(fds))

    def hear(self) -> tuple[str, list[int]]:
        body, fds, _, _ = socket.recv_fds(self._link, 4096, 8, socket.MSG_CMSG_CLOEXEC)
        if not body:
            sys.exit(0)
        return body.decode(), fds


def hold(link: Link, *_: str) -> None:
    """Keep received descriptors open until told to end."""
    while link.hear()[0] != "end":
        link.tell("held")


def create(link: Link, name: str, endpoint: str) -> None:
    """Create memory with a pattern on the first GPU, hand its descriptor over, and live on."""
    driver = open_node(name, endpoint)
    size = int(link.hear()[0])
    handle = driver.create(driver.devices()[0].id, size)
    at = driver.reserve(size)
    driver.map([(at, handle)])
    driver.write(at, pattern(7, 1, size))
    link.tell("created", driver.export(handle))
    link.hear()


def store(link: Link, *_: str) -> None:
    """Store words into a received page, with nothing but a mapping: no bell, no wake-up."""
    text, (fd,) = link.hear()
    index, value = (int(part) for part in text.split())
    page = mmap.mmap(fd, 4096)
    link.tell("ready")
    link.hear()
    page[index * 4 : index * 4 + 4] = value.to_bytes(4, "little")
    link.tell("stored")
    link.hear()


def queue(link: Link, name: str, endpoint: str) -> None:
    """Queue a copy behind a word of a received page, then do nothing."""
    text, (page_fd, memory_fd) = link.hear()
    size = int(text)
    driver = open_node(name, endpoint)
    page = driver.adopt_words(page_fd, 16)
    handle = driver.adopt(memory_fd, size)
    at, own = driver.reserve(size), driver.reserve(size)
    gpu = driver.devices()[0].id
    driver.map([(at, handle), (own, driver.create(gpu, size))])
    driver.write(own, pattern(3, 1, size))
    stream = driver.stream(gpu)
    stream.enqueue([Wait(page, 0, 1), Copy(at, own, size), Write(page, 1, 1)])
    stream.done()
    link.tell("queued")
    link.hear()


def churn(link: Link, name: str, endpoint: str) -> None:
    """Take, map, copy, hand over and give back, until killed."""
    driver = open_node(name, endpoint)
    devices = driver.devices()
    gpu, other = devices[0].id, devices[-1].id
    size = 4 << 20
    stream = driver.stream(gpu)
    link.tell("ready")
    while True:
        a, b = driver.create(gpu, size), driver.create(other, size)
        ends = [driver.reserve(size), driver.reserve(size)]
        driver.map(list(zip(ends, (a, b), strict=True)))
        held = driver.export(a)
        stream.enqueue([Copy(ends[0], ends[1], size)] * 2)
        stream.synchronize(5)
        driver.unmap(ends)
        driver.release([a, b])
        os.close(held)
        driver.unreserve(ends)


class Borrower:
    """Serves slots: checks what was fetched, and stores new versions of chunks."""

    def __init__(self, driver: MemoryDriver, page: Words, chunks: int, seed: int) -> None:
        self.driver, self.page, self.random = driver, page, random.Random(seed)
        self.acked = dict.fromkeys(range(chunks), 0)
        self.issued = dict.fromkeys(range(chunks), 0)
        self._stores = 0

    def dawdle(self) -> None:
        """Mostly prompt, sometimes late, now and then silent for long."""
        time.sleep(self.random.choice((0, 0, 0, 20e-6, 200e-6, 1e-3, 0.05 if self.random.random() < 0.1 else 0)))

    def store(self, at: Address, size: int, slot: int) -> None:
        """The store program visits chunks in turn: the last one has arrived, hand the next one over."""
        if self._stores:
            last = (self._stores - 1) % len(self.acked)
            self.acked[last] = self.issued[last]
        chunk = self._stores % len(self.acked)
        self.issued[chunk] += 1
        self.driver.write(at, pattern(chunk, self.issued[chunk], size))
        self._stores += 1
        self.page.store(slot, FULL)


def torn(seen: bytes, old: bytes, new: bytes) -> bool:
    """Whether every word is of one of two versions."""
    for at in range(0, len(seen), 4096):
        piece, before, after = seen[at : at + 4096], old[at : at + 4096], new[at : at + 4096]
        if piece not in (before, after):
            words = range(0, len(piece), 8)
            if not all(piece[i : i + 8] in (before[i : i + 8], after[i : i + 8]) for i in words):
                return False
    return True


def borrow(link: Link, name: str, _endpoint: str) -> None:
    """The borrower of the gate test. Words: 0..K-1 fetch slots, K the store slot; one slot of memory for each."""
    text, (page_fd, memory_fd, *session) = link.hear()
    gpu, *numbers = text.split()
    chunks, slots, size, seed = map(int, numbers)
    driver = open_guest(name, session[0] if session else None, GpuId(Place(gpu)))
    page = driver.adopt_words(page_fd, slots + 1)
    at = driver.reserve(size * (slots + 1))
    driver.map([(at, driver.adopt(memory_fd, size * (slots + 1)))])
    me = Borrower(driver, page, chunks, seed)
    least = dict.fromkeys(range(slots), 0)
    link.tell("ready")
    while True:
        fetched = stored = 0
        for position in range(chunks):
            slot = position % slots
            if not page.wait(slot, FULL, 30):
                link.tell(f"wrong: fetch slot {slot} not served")
                return
            seen = driver.read(at + slot * size, size)
            version = int.from_bytes(seen[4:8], "little")
            newest = me.issued[position]
            whole = seen == pattern(position, version, size) and least[slot] <= version <= newest
            # A store that was not acknowledged when the slot was handed over may have run beside the fetch.
            storing = least[slot] < newest
            if not whole and not (storing and torn(seen, *(pattern(position, v, size) for v in (newest - 1, newest)))):
                words = sorted({seen[i : i + 8].hex() for i in range(0, size, 8)})[:4]
                link.tell(f"wrong: chunk {position} has {words}, version {least[slot]}..{newest} expected")
                return
            me.dawdle()
            # From here on the fetch of position + slots may begin: it must not show less than what is acknowledged now.
            least[slot] = me.acked[(position + slots) % chunks]
            page.store(slot, EMPTY)
            fetched += 1
            if page.load(slots) == EMPTY:
                me.store(Address(at + slots * size), size, slots)
                stored += 1
        link.tell(f"step {fetched} {stored}")


def stumble(link: Link, name: str, endpoint: str) -> None:
    """Unmap the source of a queued copy, with no gate, then let the copy go: the session is lost."""
    size = int(link.hear()[0])
    driver = open_node(name, endpoint)
    gpu = driver.devices()[-1].id
    page = driver.words(1)
    ends = [driver.reserve(size), driver.reserve(size)]
    driver.map([(at, driver.create(gpu, size)) for at in ends])
    stream = driver.stream(gpu)
    stream.enqueue([Wait(page, 0, 1), Copy(ends[0], ends[1], size)])
    driver.unmap([ends[1]])
    page.store(0, 1)
    for call in (lambda: stream.synchronize(10), driver.memory):
        try:
            link.tell(f"it goes on: {call()}")
        except ContextLost as error:
            link.tell(f"lost: {error}")


ROLES: dict[str, Callable[..., None]] = {
    "hold": hold,
    "create": create,
    "store": store,
    "queue": queue,
    "churn": churn,
    "borrow": borrow,
    "stumble": stumble,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Link(int(sys.argv[2])), sys.argv[3], sys.argv[4])
