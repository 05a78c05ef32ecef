"""Messages: what is sent is what is read, anything else is refused, and the bytes stay as they are."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_core import wire

STEP = wire.CopyStep(1, 4096, 512, 3, 64)
CLIENT: list[tuple[wire.ClientMessage, str]] = [
    (wire.Hello(1, "GPU-1", "me", "p"), "95a548656c6c6f01a54750552d31a26d65a170"),
    (wire.OpenWindow(1, 2, 3, 4, 65536), "96aa4f70656e57696e646f7701020304ce00010000"),
    (wire.CloseWindow(1, 2), "93ab436c6f736557696e646f770102"),
    (wire.GrowRegion(1, 2, 1 << 20, True, 2.0), "96aa47726f77526567696f6e0102ce00100000c3cb4000000000000000"),
    (wire.RenewRegion(1, 2, 2.0), "94ab52656e6577526567696f6e0102cb4000000000000000"),
    (wire.ShrinkRegion(1, 2, 0), "94ac536872696e6b526567696f6e010200"),
    (wire.AskDropped(1, 2), "93aa41736b44726f707065640102"),
    (wire.OpenProgram(1, 2, False, [STEP]), "95ab4f70656e50726f6772616d0102c2919501cd1000cd02000340"),
    (wire.CloseProgram(1, 2), "93ac436c6f736550726f6772616d0102"),
    (wire.Start(1, 2), "93a553746172740102"),
    (wire.Run(1, True, [STEP]), "94a352756e01c3919501cd1000cd02000340"),
    (wire.GrowShare(1, 4096, 2.0), "94a947726f77536861726501cd1000cb4000000000000000"),
    (wire.ShareIs(4096), "92a753686172654973cd1000"),
    (wire.Report(0.5, 1.5, 3), "94a65265706f7274cb3fe0000000000000cb3ff800000000000003"),
    (wire.Goodbye(), "91a7476f6f64627965"),
]
AGENT: list[tuple[wire.AgentMessage, str]] = [
    (
        wire.Welcome(1, "sim", "me-1", "GPU-1", "p", 65536, 4096, 1 << 20, 0, 1000, True),
        "9ca757656c636f6d6501a373696da46d652d31a54750552d31a170ce00010000cd1000ce0010000000cd03e8c3",
    ),
    (wire.Done(1, 2), "93a4446f6e650102"),
    (wire.Refused(1, "busy", "no", "f", "v", "e"), "9aa75265667573656401a462757379a26e6fa166a176a165ffff00"),
    (wire.Queued(1, 2, 0.5), "94a65175657565640102cb3fe0000000000000"),
    (wire.Moved(1, 4096, 1000), "94a54d6f76656401cd1000cd03e8"),
    (wire.Dropped(1, 2, [3, 4], True), "95a744726f70706564010292 0304c3".replace(" ", "")),
    (wire.Lost(1, [3], "xid"), "94a44c6f7374019103a3786964"),
]


@pytest.mark.parametrize(("message", "golden"), CLIENT, ids=lambda x: type(x).__name__)
def test_bytes_from_clients_stay_as_they_are(message: wire.ClientMessage, golden: str) -> None:
    assert wire.encode(message).hex() == golden
    assert wire.decode_client(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(("message", "golden"), AGENT, ids=lambda x: type(x).__name__)
def test_bytes_from_the_agent_stay_as_they_are(message: wire.AgentMessage, golden: str) -> None:
    assert wire.encode(message).hex() == golden
    assert wire.decode_agent(bytes.fromhex(golden)) == message


def test_every_message_has_golden_bytes() -> None:
    assert {type(m) for m, _ in CLIENT} == set(get_args(wire.ClientMessage))
    assert {type(m) for m, _ in AGENT} == set(get_args(wire.AgentMessage))


@settings(max_examples=200, deadline=None)
@given(st.one_of([st.from_type(m) for m in get_args(wire.ClientMessage)]))
def test_what_a_client_sends_is_what_is_read(message: wire.ClientMessage) -> None:
    try:
        packet = wire.encode(message)
    except OverflowError:  # beyond 64 bits: the library refuses such numbers before
        return
    assert wire.encode(wire.decode_client(packet)) == packet


@settings(max_examples=100, deadline=None)
@given(st.one_of([st.from_type(m) for m in get_args(wire.AgentMessage)]))
def test_what_the_agent_sends_is_what_is_read(message: wire.AgentMessage) -> None:
    try:
        packet = wire.encode(message)
    except OverflowError:
        return
    assert wire.encode(wire.decode_agent(packet)) == packet


def listed(message: wire.ClientMessage) -> list[object]:
    found = msgspec.msgpack.decode(wire.encode(message))
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("message", [m for m, _ in CLIENT], ids=lambda m: type(m).__name__)
def test_other_shapes_are_refused(message: wire.ClientMessage) -> None:
    fields = listed(message)
    wrong: list[object] = [fields[1:], [fields[0].lower() if isinstance(fields[0], str) else 0, *fields[1:]], {}]
    if not isinstance(message, wire.Hello):
        wrong.append([*fields, 0])
    if len(fields) > 1:
        wrong += [fields[:1], [fields[0], None, *fields[2:]], [fields[0], "1", *fields[2:]], [fields[0], True]]
    for body in wrong:
        with pytest.raises(msgspec.MsgspecError):
            wire.decode_client(msgspec.msgpack.encode(body))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_whole(packet: bytes) -> None:
    try:
        message = wire.decode_client(packet)
    except msgspec.MsgspecError:
        return
    assert wire.decode_client(wire.encode(message)) == message


def test_a_newer_hello_is_read_so_that_its_version_can_be_refused() -> None:
    newer = [*listed(wire.Hello(2, "0", "me", "p")), "a field of version 2"]
    message = wire.decode_client(msgspec.msgpack.encode(newer))
    assert isinstance(message, wire.Hello)
    assert message.version == 2


def test_run_words_of_programs_and_runs_are_apart() -> None:
    words = {wire.run_word(p, s) for p in range(-1, wire.MAX_PROGRAMS) for s in (6, 7)}
    assert len(words) == wire.RUN_WORDS
    assert min(words) == wire.NOTICE_RUNS
    assert max(words) < wire.NOTICE_STARTED
