"""Hostile clients: each costs itself only."""

import os
import random
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_core import wire
from ema_driver.shared_memory import sealed_memory
from wire.conftest import Target
from wire.raw import Gone
from wire.test_messages import CLIENT, listed

STEP = wire.CopyStep(0, 0, 4096, 0)
HUGE = 2**64 - 1
LIVE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def refused(said: wire.AgentMessage, field: str = "") -> wire.Refused:
    assert isinstance(said, wire.Refused), said
    if field:
        assert (said.kind, said.field) == (wire.Kinds.BAD, field), said
        assert said.value
        assert said.expected
    return said


# --- before Hello ---


@pytest.mark.parametrize(
    "packet",
    [b"\x00", b"\xc1", os.urandom(64), b"\x95", b"\xa5hello", msgspec.msgpack.encode(["Hello"]), b"\x91" * 9000],
)
def test_bytes_that_are_no_message_get_a_refusal_and_the_end(target: Target, packet: bytes) -> None:
    with target.raw() as raw:
        raw.send(packet)
        (said,) = raw.until_gone()
        refused(said, "packet")


def test_another_version_is_told_so(target: Target) -> None:
    with target.raw() as raw:
        raw.send(msgspec.msgpack.encode([*listed(wire.Hello(7, "0", "me")), "new"]))
        (said,) = raw.until_gone()
        assert refused(said).kind == wire.Kinds.VERSION
        assert "version 7" in refused(said).message
        assert "same release" in refused(said).message


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        (wire.Hello(1, "9", "me"), "gpu"),
        (wire.Hello(1, "", "me"), "gpu"),
        (wire.Hello(1, "G" * 60_000, "me"), "gpu"),
        (wire.Hello(1, "0", "me", "none"), "pool"),
        (wire.Hello(1, "0", ""), "name"),
        (wire.Hello(1, "0", "a/b"), "name"),
        (wire.Hello(1, "0", "a" * 64), "name"),
        (wire.Hello(1, "0", "a\n"), "name"),
    ],
)
def test_a_hello_with_a_bad_field_names_it(target: Target, hello: wire.Hello, field: str) -> None:
    with target.raw() as raw:
        raw.send(hello)
        (said,) = raw.until_gone()
        refused(said, field)


def test_anything_before_hello_is_refused(target: Target) -> None:
    for message, _ in CLIENT[1:]:
        with target.raw() as raw:
            raw.send(message)
            (said,) = raw.until_gone()
            refused(said, "message")


def test_silent_connections_by_the_thousand_keep_nobody_out(target: Target) -> None:
    with ExitStack() as silent:
        for _ in range(1500):
            silent.enter_context(target.raw())
        silent.enter_context(target.raw()).hello(target.gpu)


def test_half_open_connections(target: Target) -> None:
    for _ in range(50):
        raw = target.raw()
        raw.send(wire.Hello(wire.VERSION, target.gpu, "half"))
        raw.sock.shutdown(socket.SHUT_WR)
        raw.close()


# --- packets ---


def test_oversized_packets_and_too_many_descriptors(target: Target) -> None:
    for body, fds in [(b"\xc4" * (wire.MAX_MESSAGE + 1), 0), (wire.encode(wire.ShareIs(0)), 5), (b"\xc0", 253)]:
        with target.raw() as raw, Path(os.devnull).open("rb") as null:
            raw.hello(target.gpu)
            raw.send(body, [null.fileno()] * fds)
            refused(raw.until_gone()[-1], "packet")


def test_descriptors_that_nobody_asked_for_are_closed(target: Target) -> None:
    before = descriptors()
    with target.raw() as raw, Path(os.devnull).open("rb") as null:
        welcome = raw.hello(target.gpu)
        for _ in range(20):
            raw.send(wire.ShareIs(0), [null.fileno()] * 4)
            raw.send(wire.GrowRegion(1, 0, welcome.chunk, False, 1.0), [null.fileno()] * 2)
    target.calm()
    target.node.until(lambda _: descriptors() <= before)


@LIVE
@given(body=st.binary(min_size=1, max_size=300))
def test_random_packets(target: Target, body: bytes) -> None:
    with target.raw() as raw:
        raw.hello(target.gpu)
        raw.send(body)
        with suppress(OSError):  # the first may have been the end
            raw.send(b"\xc1")
        raw.until_gone()


NUMBERS = st.one_of(
    st.sampled_from(
        [-1, 0, 1, 2, 63, 64, 1023, 1024, 4096, 2**31, 2**32, 2**53, 2**56, 2**63 - 1, 2**63, HUGE, -(2**63)]
    ),
    st.integers(-(2**63), HUGE),
)
VALUES = st.one_of(
    NUMBERS,
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.none(),
    st.booleans(),
    st.lists(st.lists(NUMBERS, max_size=6), max_size=4),
)


def mutated(draw: st.DrawFn) -> bytes:
    fields = listed(draw(st.sampled_from([m for m, _ in CLIENT])))
    for _ in range(draw(st.integers(0, 3))):
        if len(fields) > 1:
            fields[draw(st.integers(1, len(fields) - 1))] = draw(VALUES)
    packet = bytearray(msgspec.msgpack.encode(fields))
    if draw(st.booleans()):
        packet[draw(st.integers(0, len(packet) - 1))] = draw(st.integers(0, 255))
    return bytes(packet)


@LIVE
@given(packets=st.lists(st.composite(mutated)(), min_size=1, max_size=12), prepared=st.booleans())
def test_mutated_messages(target: Target, packets: list[bytes], prepared: bool) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        if prepared:
            raw.window(welcome)
            raw.region(welcome)
        with suppress(OSError):  # an earlier one may have been the end
            for packet in packets:
                raw.send(packet)
            raw.send(b"\xc1")
        raw.until_gone()


@LIVE
@given(message=st.one_of([st.from_type(m) for m in get_args(wire.ClientMessage)]))
def test_well_formed_messages_with_any_values(target: Target, message: wire.ClientMessage) -> None:
    try:
        packet = wire.encode(message)
    except OverflowError:
        return
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        raw.send(packet)
        with suppress(OSError):
            raw.send(b"\xc1")
        raw.until_gone()


# --- windows ---


def test_descriptors_that_are_no_window(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        size = welcome.granularity
        read, write = os.pipe()
        unsealed = os.memfd_create("unsealed")
        os.ftruncate(unsealed, size)
        wrong = sealed_memory("wrong", size)
        null, regular = os.open(os.devnull, os.O_RDWR), os.open("/etc/hostname", os.O_RDONLY)
        other = target.node.observer.create(target.node.gpus[2], size)
        foreign = target.node.observer.export(other)
        fds = [read, write, unsealed, wrong, null, regular, foreign, raw.fds[0], raw.sock.fileno()]
        for fd in fds:
            refused(raw.ask(wire.OpenWindow(1, 0, 0, 1, size), [fd]), "descriptor")
        for count in (0, 2, 3):
            refused(raw.ask(wire.OpenWindow(1, 0, 0, 1, size), [null] * count), "descriptors")
        for fd in (read, write, unsealed, wrong, null, regular, foreign):
            os.close(fd)
        target.node.observer.release([other])
        raw.window(welcome)


def test_a_window_of_another_size_than_said(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        size = welcome.granularity
        fd = raw.guest().export(raw.guest().create(target.gpu, 4 * size))
        for slots in (1, 2, 8):
            refused(raw.ask(wire.OpenWindow(1, 0, 0, slots, size), [fd]), "descriptor")
        os.close(fd)


@pytest.mark.parametrize(
    ("window", "first", "slots", "size", "field"),
    [
        (-1, 0, 1, 4096, "window"),
        (64, 0, 1, 4096, "window"),
        (HUGE, 0, 1, 4096, "window"),
        (0, 9, 1, 4096, "window"),
        (1, 0, 1, 4096, "first"),
        (1, 1, 4, 4096, "first"),
        (1, -1, 1, 4096, "slots"),
        (1, 1024, 1, 4096, "slots"),
        (1, 2, 0, 4096, "slots"),
        (1, 2, -4, 4096, "slots"),
        (1, 2, HUGE, 4096, "slots"),
        (1, 2, 1, 0, "slot_bytes"),
        (1, 2, 1, -4096, "slot_bytes"),
        (1, 2, 1, 4095, "slot_bytes"),
        (1, 2, 1, 2**63, "slot_bytes"),
        (1, 2, 1000, 2**63, "slot_bytes"),
        (1, 2, 1, HUGE - 4095, "slot_bytes"),
    ],
)
def test_a_window_that_cannot_be(  # noqa: PLR0917
    target: Target, window: int, first: int, slots: int, size: int, field: str
) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        fd = raw.guest().export(raw.guest().create(target.gpu, 4096))
        refused(raw.ask(wire.OpenWindow(1, window, first, slots, size), [fd]), field)
        os.close(fd)


def test_closing_windows_in_use_twice_or_never_opened(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        size = raw.window(welcome)
        raw.window(welcome, number=1, first=2)
        raw.region(welcome)
        program = wire.OpenProgram(2, 0, store=False, steps=[wire.CopyStep(0, 0, size, 0)])
        assert isinstance(raw.ask(program), wire.Done)
        raw.send(wire.Run(1, store=True, steps=[wire.CopyStep(0, 0, size, 2)]))  # waits for a slot that is never full
        assert refused(raw.ask(wire.CloseWindow(3, 0))).kind == wire.Kinds.IN_USE
        assert refused(raw.ask(wire.CloseWindow(3, 1))).kind == wire.Kinds.IN_USE
        assert isinstance(raw.ask(wire.CloseProgram(4, 0)), wire.Done)
        refused(raw.ask(wire.CloseProgram(4, 0)), "program")
        assert isinstance(raw.ask(wire.CloseWindow(5, 0)), wire.Done), "a run in another window is no reason"
        for number in (0, 7, -1, HUGE):
            refused(raw.ask(wire.CloseWindow(6, number)), "window")


# --- programs and runs ---


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (wire.CopyStep(9, 0, 4096, 0), "steps[0].region"),
        (wire.CopyStep(-1, 0, 4096, 0), "steps[0].region"),
        (wire.CopyStep(HUGE, 0, 4096, 0), "steps[0].region"),
        (wire.CopyStep(0, -1, 4096, 0), "steps[0].at"),
        (wire.CopyStep(0, HUGE, 4096, 0), "steps[0].at"),
        (wire.CopyStep(0, 2 << 18, 1, 0), "steps[0].at"),
        (wire.CopyStep(0, (2 << 18) - 1, 2, 0), "steps[0].at"),
        (wire.CopyStep(0, 0, 0, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, -1, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, 4097, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, HUGE, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, 4096, 0, 1), "steps[0].size"),
        (wire.CopyStep(0, 0, 1, 0, -1), "steps[0].size"),
        (wire.CopyStep(0, 0, 1, 0, HUGE), "steps[0].size"),
        (wire.CopyStep(0, 0, 4096, 2), "steps[0].slot"),
        (wire.CopyStep(0, 0, 4096, -1), "steps[0].slot"),
        (wire.CopyStep(0, 0, 4096, HUGE), "steps[0].slot"),
    ],
)
def test_a_step_out_of_range_names_its_field(target: Target, step: wire.CopyStep, field: str) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        refused(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[step])), field)
        raw.send(wire.Run(1, store=True, steps=[step]))
        said = refused(raw.answer(wire.Refused), field)
        assert (said.id, said.word, said.seq) == (0, wire.run_word(-1, 1), 1)
        # The number was not used up by what did not take place.
        raw.send(wire.Run(1, store=False, steps=[STEP]))
        notice = raw.page(1)
        assert notice.wait(wire.NOTICE_STARTED + wire.run_word(-1, 1), 1, 5.0)


@pytest.mark.parametrize("program", [1, -1, 64, HUGE, 2**63])
def test_starting_what_was_never_opened(target: Target, program: int) -> None:
    with target.raw() as raw:
        raw.hello(target.gpu)
        raw.send(wire.Start(program, 1))
        refused(raw.answer(wire.Refused), "program")


def test_no_steps_too_many_and_a_number_in_use(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        for steps in ([], [wire.CopyStep(0, 0, 1, 0)] * 1025):
            refused(raw.ask(wire.OpenProgram(1, 0, store=False, steps=steps)), "steps")
        assert isinstance(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[STEP] * 1024)), wire.Done)
        for number in (0, -1, 64, HUGE):
            refused(raw.ask(wire.OpenProgram(1, number, store=False, steps=[STEP])), "program")


def test_more_than_two_runs_repeats_and_runs_out_of_order(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        shared, notice = raw.page(0), raw.page(1)
        assert isinstance(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[STEP])), wire.Done)
        shared.store(wire.SLOT_FLAG, wire.FULL)  # so that fetches wait
        for seq in (5, 5, 4, 1, 0, -7, 6):
            raw.send(wire.Start(0, seq))
        raw.send(wire.Start(0, 7))
        raw.send(wire.Run(1, store=False, steps=[STEP]))
        for word, seq in ((wire.run_word(0, 7), 7), (wire.run_word(-1, 1), 1)):
            said = refused(raw.answer(wire.Refused))
            assert (said.kind, said.word, said.seq) == (wire.Kinds.BUSY, word, seq)
        assert notice.load(wire.NOTICE_STARTED + wire.run_word(0, 5)) == 5
        assert notice.load(wire.NOTICE_STARTED + wire.run_word(0, 6)) == 6
        assert refused(raw.ask(wire.CloseProgram(2, 0))).kind == wire.Kinds.IN_USE
        for seq in (5, 6):
            shared.store(wire.SLOT_FLAG, wire.EMPTY)
            assert notice.wait(wire.run_word(0, seq), 0, 5.0)
        assert shared.load(wire.SLOT_FLAG) == wire.FULL
        assert isinstance(raw.ask(wire.CloseProgram(2, 0)), wire.Done)


# --- regions ---


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (wire.GrowRegion(1, -1, 4096, droppable=False, timeout=1.0), "region"),
        (wire.GrowRegion(1, 1024, 4096, droppable=False, timeout=1.0), "region"),
        (wire.GrowRegion(1, 1, 0, droppable=False, timeout=1.0), "size"),
        (wire.GrowRegion(1, 1, -1, droppable=False, timeout=1.0), "size"),
        (wire.GrowRegion(1, 1, 4096, droppable=False, timeout=float("nan")), "timeout"),
        (wire.GrowRegion(1, 1, 4096, droppable=False, timeout=-1.0), "timeout"),
        (wire.GrowRegion(1, 0, 4096, droppable=True, timeout=1.0), "droppable"),
        (wire.RenewRegion(1, 0, float("nan")), "timeout"),
        (wire.RenewRegion(1, 5, 1.0), "region"),
        (wire.ShrinkRegion(1, 0, -1), "size"),
        (wire.ShrinkRegion(1, 0, 1 << 40), "size"),
        (wire.ShrinkRegion(1, 5, 0), "region"),
        (wire.AskDropped(1, 5), "region"),
        (wire.GrowShare(1, -1, 1.0), "size"),
        (wire.GrowShare(1, 1 << 50, 1.0), "size"),
        (wire.GrowShare(1, 0, float("nan")), "timeout"),
        (wire.Hello(1, "0", "again"), "message"),
        (wire.ShareIs(-1), "size"),
        (wire.Report(float("nan"), 0.0, 0), "report"),
        (wire.Report(0.0, float("inf"), 0), "report"),
        (wire.Report(0.0, 0.0, -1), "report"),
    ],
)
def test_requests_out_of_range_name_their_field(target: Target, message: wire.ClientMessage, field: str) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.region(welcome)
        refused(raw.ask(message), field)


@pytest.mark.parametrize("size", [1 << 40, 2**63, HUGE])
def test_more_than_the_limit_is_refused_at_once(target: Target, size: int) -> None:
    with target.raw() as raw:
        raw.hello(target.gpu)
        said = refused(raw.ask(wire.GrowRegion(1, 0, size, droppable=False, timeout=float("inf"))))
        assert said.kind == wire.Kinds.LIMIT


def test_a_region_is_changed_by_one_request_at_a_time(target: Target) -> None:
    """Two cuts, renewals or a growth in the midst of one would give chunks back twice."""
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome, chunks=4)
        shared = raw.page(0)
        raw.send(
            wire.Run(1, store=True, steps=[wire.CopyStep(0, 3 * welcome.chunk, 4096, 0)])
        )  # waits: a cut waits too
        raw.send(wire.ShrinkRegion(11, 0, 0))
        for request in (
            wire.ShrinkRegion(12, 0, 0),
            wire.RenewRegion(13, 0, 1.0),
            wire.GrowRegion(14, 0, 8 * welcome.chunk, droppable=False, timeout=1.0),
        ):
            assert refused(raw.ask(request)).kind == wire.Kinds.BUSY
        shared.store(wire.SLOT_FLAG, wire.FULL)
        assert raw.answer(wire.Done).id == 11
        refused(raw.ask(wire.ShrinkRegion(15, 0, 0)), "region")


def test_a_program_opened_while_its_region_waits_to_be_cut_keeps_it(target: Target) -> None:
    """Else its next start would copy from memory that is gone, which costs the agent its driver session."""
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome, chunks=2)
        shared, notice = raw.page(0), raw.page(1)
        raw.send(wire.Run(1, store=True, steps=[STEP]))
        raw.send(wire.ShrinkRegion(11, 0, 0))
        raw.send(wire.OpenProgram(12, 0, store=False, steps=[wire.CopyStep(0, welcome.chunk, 4096, 1)]))
        assert raw.answer(wire.Done).id == 12
        shared.store(wire.SLOT_FLAG, wire.FULL)
        said = refused(raw.answer(wire.Refused))
        assert (said.id, said.kind) == (11, wire.Kinds.IN_USE)
        raw.send(wire.Start(0, 1))
        word = wire.run_word(0, 1)
        assert notice.wait(wire.NOTICE_STARTED + word, 1, 5.0)
        assert notice.wait(word, 0, 5.0)


def test_a_growth_given_up_waits_for_no_run(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        raw.send(wire.Run(1, store=True, steps=[STEP]))  # never ends
        most = (welcome.limit // welcome.chunk - 2) * welcome.chunk  # the neighbour has some of it
        said = refused(raw.ask(wire.GrowRegion(1, 1, most, droppable=False, timeout=0.05)))
        assert said.kind == wire.Kinds.FULL
        assert said.position >= 0


# --- behaviour ---


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


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hundreds_at_once(target: Target) -> None:
    with ExitStack() as many:
        for i in range(350):
            many.enter_context(target.raw()).hello(target.gpu, f"many-{i}")
