"""torch on lent memory. Needs torch; nothing else of `ema` imports it."""

from ema.torch.spill import spill_activations
from ema.torch.spill_context import Spill
from ema.torch.spill_report import SpillReport

__all__ = ["Spill", "SpillReport", "spill_activations"]
