"""Pages on models: what they show runs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")

from nodes import Node

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["training", "transformers"])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # newer ones call it `cache`
def test_every_snippet_runs(torch_node: Node, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.setenv("EMA_SOCKET", torch_node.socket)
    monkeypatch.setenv("EMA_GPU", torch_node.gpus[0])
    snippets = re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 4
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/{page}.md, snippet {number}", "exec"), names)  # noqa: S102 - our own page
    names.clear()
    torch_node.until(lambda a: not a.sessions, saying="every session has ended")
