"""Simulated GPUs with real bytes and descriptors, in a device process that all sessions share. See `docs/sim.md`."""

from ema_driver.sim.config import GpuGroup, LinkOverride, SimConfig
from ema_driver.sim.faults import Fault
from ema_driver.sim.session import SimDriver, SimHandle
from ema_driver.sim.start import SimServer, start

__all__ = ["Fault", "GpuGroup", "LinkOverride", "SimConfig", "SimDriver", "SimHandle", "SimServer", "start"]
