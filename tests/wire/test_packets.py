"""Hostile packets: too large, with descriptors nobody asked for, random, mutated, or well formed with any values."""

import os
from contextlib import suppress
from pathlib import Path
from typing import get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ema_core import wire
from wire.conftest import Target
from wire.hostile import HUGE, LIVE, descriptors, refused
from wire.test_messages import CLIENT, listed


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
