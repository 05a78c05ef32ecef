"""The administrator's socket under bad lines: each gets its answer, and the agent lives."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_agent.admin import Admin
from wire.conftest import Target


class Asker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, line: bytes) -> dict[str, Any] | None:
        """One answer, or None where the agent closed the connection."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(self.path))
            try:
                sock.sendall(line + b"\n")
                with sock.makefile("rb") as lines:
                    answer = lines.readline()
            except ConnectionError:
                return None
        found = json.loads(answer) if answer else None
        assert found is None or isinstance(found, dict)
        return found


@pytest.fixture
def admin(target: Target) -> Iterator[Asker]:
    path = target.node.folder / "admin.sock"
    it = target.node.on_loop(lambda: Admin(target.node.agent, path))
    asyncio.run_coroutine_threadsafe(it.open(), target.node.loop).result(5)
    yield Asker(path)
    asyncio.run_coroutine_threadsafe(it.close(), target.node.loop).result(5)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"", "request"),
        (b"\xff\xfe", "request"),
        (b"nonsense", "request"),
        (b"[" * 100_000, "request"),
        (b"1" * 10_000, "request"),
        (b"[]", "request"),
        (b"null", "request"),
        (b"{}", "do"),
        (b'{"do": "dance"}', "do"),
        (b'{"do": ["status"]}', "do"),
        (b'{"do": "drain"}', "gpu"),
        (b'{"do": "drain", "gpu": 99}', "gpu"),
        (b'{"do": "drain", "gpu": "0", "undo": "no"}', "undo"),
        (b'{"do": "reload"}', "pools"),
        (b'{"do": "reload", "pools": 5}', "pools"),
        (b'{"do": "reload", "pools": []}', "pool"),
        (b'{"do": "reload", "pools": [5]}', ""),
        (b'{"do": "inject"}', "fault"),
        (b'{"do": "inject", "fault": {"kind": "lost"}}', "fault"),
        (b'{"do": "inject", "fault": {"kind": "lost", "gpu": 99}}', "driver"),
        (b'{"do": "clear", "fault": {"kind": "lost", "gpu": -1}}', "fault"),
    ],
)
def test_a_bad_line_names_its_field(admin: Asker, line: bytes, field: str) -> None:
    answer = admin.ask(line)
    assert answer is not None
    assert answer["ok"] is False
    assert answer["errors"][0]["expected"]
    if field:
        assert answer["errors"][0]["field"] == field


def test_a_line_without_end_costs_its_connection_only(admin: Asker) -> None:
    assert admin.ask(b"x" * (3 << 20)) is None
    answer = admin.ask(b'{"do": "status"}')
    assert answer is not None
    assert answer["ok"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    request=st.dictionaries(
        st.sampled_from(["do", "gpu", "undo", "pools", "fault"]),
        st.recursive(
            st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(["drain", "reload"])),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_any_object_gets_an_answer(admin: Asker, request: dict[str, Any]) -> None:
    if request.get("do") in ["drain", "inject"]:
        request["do"] = "reload"
    answer = admin.ask(json.dumps(request).encode())
    assert answer is not None
    assert "ok" in answer


def test_many_at_once(admin: Asker) -> None:
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(admin.ask(b'{"do": "leases"}'))) for _ in range(50)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(answers) == 50
    assert None not in answers
