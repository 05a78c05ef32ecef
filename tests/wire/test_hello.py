"""Hostile clients before they are clients: bytes that are no Hello, silence, half-open connections."""

import os
import socket
from contextlib import ExitStack

import msgspec
import pytest

from ema_core import wire
from wire.conftest import Target
from wire.hostile import refused
from wire.test_messages import CLIENT, listed


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
