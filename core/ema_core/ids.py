"""Names of things. All are plain strings; the types keep them from being mixed up."""

from typing import NewType

Place = NewType("Place", str)
"""Where bytes can live: a GPU's UUID, or `HOST`."""

GpuId = NewType("GpuId", Place)
"""A GPU's UUID. Identity is the UUID, never the index: enumeration order may change at any start."""

LeaseId = NewType("LeaseId", str)
"""One borrower's lease on a node. Unique while the agent knows it."""

PoolName = NewType("PoolName", str)
"""`metadata.name` of a MemoryPool."""

HOST = Place("host")
"""Host memory, as one more place beside the GPUs."""
