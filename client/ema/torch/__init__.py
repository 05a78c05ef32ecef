"""torch on lent memory. Needs torch; nothing else of `ema` imports it."""

from ema.torch.handles import Streamed
from ema.torch.stream import Report, report, stream, unstream

__all__ = ["Report", "Streamed", "report", "stream", "unstream"]
