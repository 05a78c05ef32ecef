"""torch on lent memory. Needs torch; nothing else of `ema` imports it."""

from ema.torch.handles import Streamed
from ema.torch.spill import spill_activations
from ema.torch.spill_context import Spill
from ema.torch.spill_report import SpillReport
from ema.torch.stream import Report, report, stream, unstream

__all__ = ["Report", "Spill", "SpillReport", "Streamed", "report", "spill_activations", "stream", "unstream"]
