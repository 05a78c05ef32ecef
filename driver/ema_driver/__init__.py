"""Memory drivers: one Protocol (`ema_driver.protocol`) and its implementations, opened by name."""

from ema_core.ids import GpuId
from ema_driver.errors import DriverUnavailable
from ema_driver.protocol import MemoryDriver


def open_node(name: str, endpoint: str) -> MemoryDriver:
    """The agent's session with all GPUs of this node. `endpoint` is the device process's socket for `sim`.

    Raises DriverUnavailable.
    """
    # A driver is imported only where it is used.
    if name == "cuda":
        from ema_driver.cuda import CudaDriver  # noqa: PLC0415

        return CudaDriver.node()
    if name != "sim":
        raise DriverUnavailable(f"driver {name!r} is not built in; sim and cuda are")
    from ema_driver.sim.session import SimDriver  # noqa: PLC0415

    try:
        return SimDriver.connect(endpoint)
    except OSError as error:
        raise DriverUnavailable(f"no simulated GPUs answer at {endpoint}: {error.strerror or error}") from error


def open_guest(name: str, fd: int | None, gpu: GpuId) -> MemoryDriver:
    """A borrower's session with its own GPU. `fd` is what the agent sent for it and becomes the session's.

    Raises DriverUnavailable.
    """
    if name == "cuda":
        from ema_driver.cuda import CudaDriver  # noqa: PLC0415

        return CudaDriver.guest_of(gpu)
    if name != "sim" or fd is None:
        raise DriverUnavailable(f"driver {name!r} is not built in; cuda is, and sim with a session from the agent")
    from ema_driver.sim.session import SimDriver  # noqa: PLC0415

    return SimDriver.from_fd(fd)
