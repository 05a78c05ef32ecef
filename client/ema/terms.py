"""What the agent tells a client when it connects: its GPU, its lease, and the sizes that everything is made in."""

from ema_core import wire
from ema_core.ids import GpuId, Place


class Terms:
    """Those of the agent that is connected now."""

    _welcome: wire.Welcome

    @property
    def gpu(self) -> GpuId:
        """This process's own GPU."""
        return GpuId(Place(self._welcome.gpu))

    @property
    def chunk(self) -> int:
        """Bytes of a chunk: regions and shares are whole numbers of it."""
        return self._welcome.chunk

    @property
    def granularity(self) -> int:
        """Windows are multiples of this many bytes."""
        return self._welcome.granularity

    @property
    def lease(self) -> str:
        """Name of this process's lease on the node."""
        return self._welcome.lease

    @property
    def limit(self) -> int:
        """Bytes that this lease may ever hold."""
        return self._welcome.limit

    @property
    def guaranteed(self) -> int:
        """Bytes that this lease gets before others."""
        return self._welcome.guaranteed

    @property
    def rate(self) -> int:
        """Bytes per second of the fastest path from a neighbour to this GPU."""
        return self._welcome.rate
