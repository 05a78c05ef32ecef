"""What reports of served requests have in common, be they replayed or run: figures, and how memory is drawn."""

from collections.abc import Sequence
from typing import Any, Final

from ema_cli.picture import Layer
from ema_cli.serving.outcome import Outcome

LAYERS: Final = (
    Layer("own weights", "#9aa5b1"),
    Layer("own keys and values", "#2f6fb3"),
    Layer("lent to others", "#e2a13b"),
    Layer("borrowed (elsewhere)", "#58a55c"),
)
"""Memory of a GPU, from the bottom up."""


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of them lie (0 to 1), 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def served_figures(outcome: Outcome) -> dict[str, Any]:
    """Requests, seconds and tokens per second."""
    return {
        "offered": outcome.offered,
        "served": outcome.served,
        "gave_up": outcome.gave_up,
        "unfinished": outcome.unfinished,
        "wait_p50_seconds": quantile(outcome.waits, 0.5),
        "wait_p99_seconds": quantile(outcome.waits, 0.99),
        "latency_p50_seconds": quantile(outcome.latencies, 0.5),
        "latency_p99_seconds": quantile(outcome.latencies, 0.99),
        "tokens_per_second": outcome.tokens / outcome.duration,
        "preemptions": outcome.preemptions,
    }


def floor_of(weights: int, memory: int) -> int:
    """Bytes at which axes begin: inside the weights, which never change."""
    return max(0, weights - (memory - weights) // 4)
