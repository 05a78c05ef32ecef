"""torch on lent memory. Needs torch; nothing else of `ema` imports it."""

from ema.torch.spill import Spill, SpillReport, spill_activations

__all__ = ["Spill", "SpillReport", "spill_activations"]
