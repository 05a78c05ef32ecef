"""EMA client: borrow memory of idle GPUs in the same server.

import ema

pool = ema.connect()
region = pool.region(24 << 30)
window = pool.window(slots=4, slot_bytes=64 << 20)
region.fetch(at=0, into=window[0])
data = window[0].wait()
"""

from ema.errors import (
    AgentLost,
    BadInput,
    DataLost,
    EmaError,
    InUse,
    LimitReached,
    OutOfMemory,
    PoolFull,
    Reclaimed,
    TimedOut,
)
from ema.pool import Pool, connect
from ema.program import Program
from ema.region import Region
from ema.share import Share
from ema.tickets import Ticket
from ema.window import Slot, Window

__all__ = [
    "AgentLost",
    "BadInput",
    "DataLost",
    "EmaError",
    "InUse",
    "LimitReached",
    "OutOfMemory",
    "Pool",
    "PoolFull",
    "Program",
    "Reclaimed",
    "Region",
    "Share",
    "Slot",
    "Ticket",
    "TimedOut",
    "Window",
    "connect",
]
