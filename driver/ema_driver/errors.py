"""What a memory driver raises. Callers catch `DriverError`, or the kind they can do something about."""

from ema_core.ids import Place


class DriverError(Exception):
    """A driver call failed; nothing of it took effect unless a subclass says otherwise."""


class DriverUnavailable(DriverError):
    """There is no such driver on this machine; the message says what was looked for and what to do."""


class OutOfMemory(DriverError):
    """`place` has not `asked` bytes free."""

    def __init__(self, place: Place, asked: int, free: int) -> None:
        super().__init__(f"{place}: {asked} bytes asked, {free} free")
        self.place, self.asked, self.free = place, asked, free


class InvalidUse(DriverError):
    """The caller broke a rule of the Protocol (a size that is no multiple of the granularity, an unknown address)."""


class NotMapped(InvalidUse):
    """Nothing is mapped at an address just now. Nothing was queued: do it again when something is."""


class DeviceLost(DriverError):
    """The device fell off the bus: what was on it is gone."""


class ContextLost(DriverError):
    """A sticky error: every later call of this session fails alike. The process must exit and start again."""
