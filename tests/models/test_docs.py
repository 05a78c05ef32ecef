"""docs/torch.md: what it shows runs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import ema
from nodes import Node

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()


def test_every_snippet_runs(torch_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMA_SOCKET", torch_node.socket)
    monkeypatch.setenv("EMA_GPU", torch_node.gpus[0])
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 4
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/torch.md, snippet {number}", "exec"), names)  # noqa: S102 - our own page
    pool = names.pop("pool")
    assert isinstance(pool, ema.Pool)
    pool.close()
    names.clear()
