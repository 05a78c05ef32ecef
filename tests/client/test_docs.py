"""docs/client.md: what it shows runs, and its table of errors has them all."""

import re
from pathlib import Path

import pytest

import ema
from nodes import Node

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()


def test_every_snippet_runs(shared_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMA_SOCKET", shared_node.socket)
    monkeypatch.setenv("EMA_GPU", shared_node.gpus[0])
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 8
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/client.md, snippet {number}", "exec"), names)  # noqa: S102 - our own page
    names.clear()


def test_every_error_is_in_the_table() -> None:
    rows = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
    known = {n for n in ema.__all__ if isinstance(getattr(ema, n), type) and issubclass(getattr(ema, n), ema.EmaError)}
    assert rows == known - {"EmaError"}
