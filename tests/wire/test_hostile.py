"""Hostile behaviour: each client costs itself only."""

import os
import random
import struct
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ema_core import wire
from wire.conftest import Target
from wire.hostile import STEP, descriptors
from wire.raw import Gone
from wire.test_messages import CLIENT


def test_a_client_that_never_reads_is_cut_off(target: Target) -> None:
    with target.raw() as raw:
        raw.hello(target.gpu)
        packet = wire.encode(wire.AskDropped(1, 9))
        raw.sock.settimeout(5.0)
        with pytest.raises(OSError, match=r"pipe|reset"):  # noqa: PT012
            for _ in range(100_000):
                raw.send(packet)


def test_floods_from_several(target: Target) -> None:
    packets = [wire.encode(m) for m, _ in CLIENT[1:-1]]

    def flood(seed: int) -> None:
        chance = random.Random(seed)
        with target.raw() as raw:
            raw.hello(target.gpu, f"flood-{seed}")
            raw.sock.setblocking(False)
            for _ in range(3000):
                try:
                    raw.send(chance.choice(packets))
                    raw.sock.recv(wire.MAX_MESSAGE)
                except BlockingIOError:
                    continue
                except OSError:
                    return

    threads = [threading.Thread(target=flood, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)


def test_hostile_writes_to_the_pages(target: Target) -> None:
    """Flags, positions, notices, even the word that rings the device: all lies, and all the liar's own loss."""
    chance = random.Random(1)
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        assert isinstance(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[STEP] * 8)), wire.Done)
        guest = raw.guest()
        stop = threading.Event()

        def scribble() -> None:
            files = [os.dup(fd) for fd in raw.fds[:2]]
            sizes = [os.fstat(fd).st_size for fd in files]
            while not stop.is_set():
                for fd, size in zip(files, sizes, strict=True):
                    at = chance.choice([0, size - 4, 4 * chance.randrange(size // 4)])
                    os.pwrite(fd, struct.pack("I", chance.choice([0, 1, 2, 0xFFFFFFFF])), at)
            for fd in files:
                os.close(fd)

        thread = threading.Thread(target=scribble)
        thread.start()
        for seq in range(1, 200):
            raw.send(wire.Start(0, seq))
            raw.send(wire.Run(seq, store=bool(seq % 2), steps=[STEP]))
            if seq % 20 == 0:
                raw.ask(wire.AskDropped(seq, 0))
        assert guest.memory()
        stop.set()
        thread.join()


@pytest.mark.parametrize("how", ["goodbye", "close", "reset"])
def test_500_come_and_go_and_nothing_is_left(target: Target, how: str) -> None:
    count = 170

    def one(i: int) -> None:
        raw = target.raw()
        welcome = raw.hello(target.gpu, f"churn-{i}")
        if i % 4 == 0:
            raw.window(welcome)
            raw.region(welcome, chunks=1)
            raw.send(wire.Run(1, store=True, steps=[STEP]))  # never ends
        if how == "goodbye":
            raw.send(wire.Goodbye())
            with pytest.raises(Gone):
                raw.receive()
        (raw.reset if how == "reset" else raw.close)()

    for i in range(10):
        one(i)
    target.calm()
    before, rss = descriptors(), resident()
    for i in range(count):
        one(i)
    target.calm()
    target.node.until(lambda _: descriptors() <= before, saying="descriptors as before")
    assert resident() - rss < 16 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hundreds_at_once(target: Target) -> None:
    with ExitStack() as many:
        for i in range(350):
            many.enter_context(target.raw()).hello(target.gpu, f"many-{i}")
