"""Outputs that were computed from lost weights become NaN.

A stream cannot raise. When the agent is gone, what is queued has to pass, and reads whatever is in the slots by then.
So the last work of each step looks, in the stream's own order, at words that say whether that may have happened.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Poison:
    """Its look costs three tiny kernels and allocates nothing."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Two words (int32, one element each) that are 0 while all is well, and 1 before anything wrong can be read."""
        self._words = (first, second)
        self._either = torch.zeros_like(first)
        self._table = torch.tensor([1.0, float("nan")], device=first.device)
        self._chosen = torch.ones(1, device=first.device)
        self._factor = self._chosen[0]

    def __call__(self, output: Any) -> None:  # noqa: ANN401 - whatever a forward gives
        """Make every floating tensor of an output NaN if anything was lost."""
        with torch.inference_mode():
            torch.maximum(*self._words, out=self._either)
            torch.index_select(self._table, 0, self._either, out=self._chosen)
        self._spoil(output)

    def _spoil(self, output: Any) -> None:  # noqa: ANN401
        if isinstance(output, torch.Tensor):
            if output.dtype.is_floating_point and output.device == self._chosen.device:
                _scale(output, self._factor)
        elif isinstance(output, Mapping):
            self._spoil(list(output.values()))
        elif isinstance(output, Sequence) and not isinstance(output, str | bytes):
            for part in output:
                self._spoil(part)


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    # Times 1 changes no bit, which adding 0 would: of -0.
    part = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    with torch.inference_mode(tensor.is_inference()):
        part.mul_(factor)
