"""Whatever a user passes wrong is said: which field, what it was, what is right. Nothing has changed then."""

from typing import Any

import pytest

import ema
from nodes import Node

NAN = float("nan")
CALLS: list[tuple[str, str]] = [
    *(("size", f"pool.region({v})") for v in ("0", "-1", "1.5", "'1'", "None", "True", "2**70")),
    *(("timeout", f"pool.region(1, timeout={v})") for v in ("-1", "NAN", "'1'", "None", "True")),
    *(("slots", f"pool.window({v}, 4096)") for v in ("0", "-1", "1025", "'1'", "None")),
    *(("slot_bytes", f"pool.window(1, {v})") for v in ("0", "-4096", "4095", "2**70", "4096.0")),
    *(("size", f"pool.share({v})") for v in ("0", "1", "-1", "'1'")),
    ("steps", "pool.program([])"),
    ("steps", "pool.program([region.step(window[0], size=1)] * 1025)"),
    ("steps[1]", "pool.program([region.step(window[0], size=1), (0, 0)])"),
    *(("size", f"region.grow({v})") for v in ("0", "-1", "'1'")),
    ("timeout", "region.grow(1, timeout=NAN)"),
    *(("size", f"region.shrink({v})") for v in ("-1", "1 << 40", "None")),
    *(("at", f"region.store(b'x', at={v})") for v in ("-1", "1 << 40", "'0'", "None", "0.0")),
    ("at", "region.store(b'xx', at=region.size - 1)"),
    *(("source", f"region.store({v}, at=0)") for v in ("b''", "'text'", "5", "None", "memoryview(b'abcd')[::2]")),
    *(("into", f"region.fetch(0, into={v})") for v in ("b'read-only'", "bytearray()", "'text'", "None")),
    ("size", "region.store(b'x', at=0, size=2)"),
    ("size", "region.fetch(0, into=bytearray(4), size=0)"),
    ("at", "region.fetch(region.size, into=window[0])"),
    *(("size", f"region.fetch(0, into=window[0], size={v})") for v in ("0", "-1", "4097")),
    ("slot", "region.step(0)"),
    ("slot_at", "region.step(window[0], slot_at=4096)"),
    ("size", "region.step(window[0], slot_at=1, size=4096)"),
    ("timeout", "window[0].wait(-1)"),
    ("timeout", "window[0].wait(NAN)"),
    ("timeout", "region.fetch(0, into=window[1]).wait('1')"),
    ("timeout", "region.renew(timeout=-1)"),
]


@pytest.mark.parametrize(("field", "call"), CALLS)
def test_bad_input_names_field_value_and_what_is_right(client: ema.Pool, field: str, call: str) -> None:
    region, window = client.region(2 * client.chunk), client.window(2, 4096)
    with pytest.raises(ema.BadInput) as caught:
        eval(call, {"pool": client, "region": region, "window": window, "NAN": NAN})  # noqa: S307
    assert caught.value.field == field
    assert str(caught.value.value)
    assert caught.value.expected
    assert str(caught.value).startswith(f"{field} is ")
    assert isinstance(caught.value, ValueError)
    found = bytearray(8)
    region.fetch(0, found)
    assert found == bytes(8)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("gpu", {"gpu": "nine"}),
        ("gpu", {"gpu": 99}),
        ("gpu", {"gpu": -1}),
        ("gpu", {"gpu": True}),
        ("gpu", {"gpu": 1.0}),
        ("gpu", {}),
        ("name", {"gpu": 0, "name": "a b"}),
        ("name", {"gpu": 0, "name": "x" * 64}),
        ("pool", {"gpu": 0, "pool": "none"}),
        ("pool", {"gpu": 0, "pool": 5}),
        ("timeout", {"gpu": 0, "timeout": -1}),
        ("timeout", {"gpu": 0, "timeout": "soon"}),
        ("socket", {"gpu": 0, "socket": "/" + 200 * "x"}),
    ],
)
def test_connecting_with_bad_input(shared_node: Node, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ema.BadInput) as caught:
        ema.connect(**{"socket": shared_node.socket, **arguments})
    assert caught.value.field == field


def test_numbers_of_numpy_and_the_like_are_numbers(client: ema.Pool) -> None:
    class Int:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    assert client.region(Int(5)).size == client.chunk  # type: ignore[arg-type]


def test_a_slot_of_another_pool(shared_node: Node, client: ema.Pool) -> None:
    with ema.connect(shared_node.socket, gpu=shared_node.gpus[1]) as other, pytest.raises(ema.BadInput, match="slot"):
        client.region(client.chunk).fetch(0, into=other.window(1, 4096)[0])


def test_a_program_of_droppable_bytes(client: ema.Pool) -> None:
    region = client.region(client.chunk, droppable=True)
    with pytest.raises(ema.BadInput, match="droppable"):
        client.program([region.step(client.window(1, 4096)[0])])
