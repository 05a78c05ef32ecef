"""Slots handed to and fro in the order of the computation: on the CPU, or on the stream that torch uses just then."""

from typing import TYPE_CHECKING, Protocol

import torch

from ema.torch.memory import device_of
from ema_core.wire import EMPTY, FULL
from ema_driver.protocol import StreamOrdered

if TYPE_CHECKING:
    from ema.pool import Pool
    from ema.window import Slot


class Handover(Protocol):
    """Four moments of a slot's life, as the computation sees them."""

    def await_full(self, slot: "Slot") -> None:
        """What follows sees the bytes that a fetch puts into the slot."""
        ...

    def await_empty(self, slot: "Slot") -> None:
        """What follows may overwrite the slot: its store is done."""
        ...

    def emptied(self, slot: "Slot") -> None:
        """What came before was the last use of the fetched bytes: the next fetch may overwrite them."""
        ...

    def filled(self, slot: "Slot") -> None:
        """What came before wrote the slot: its store may take the bytes."""
        ...


def handover(pool: "Pool") -> Handover:
    """How the slots of this pool are handed over."""
    driver = pool.driver
    return _OnStream(driver, device_of(pool)) if isinstance(driver, StreamOrdered) else _OnCpu()


class _OnCpu:
    """Simulated GPUs: the CPU plays the kernels, and waits itself. Raises what `Slot.wait` raises."""

    def await_full(self, slot: "Slot") -> None:
        slot.wait()

    def await_empty(self, slot: "Slot") -> None:
        slot.wait_empty()

    def emptied(self, slot: "Slot") -> None:
        slot.release()

    def filled(self, slot: "Slot") -> None:
        slot.fill()


class _OnStream:
    """Real GPUs: the stream waits, and this thread goes on. Nothing here can fail because of the agent."""

    def __init__(self, driver: StreamOrdered, device: torch.device) -> None:
        def wait(slot: "Slot", value: int) -> None:
            driver.wait_on(_stream(device), *slot.flag, value)

        def write(slot: "Slot", value: int) -> None:
            driver.write_on(_stream(device), *slot.flag, value)

        # Around a compiled model these are called, not traced: no compiler knows such operations.
        self._wait, self._write = torch.compiler.disable(wait), torch.compiler.disable(write)

    def await_full(self, slot: "Slot") -> None:
        self._wait(slot, FULL)

    def await_empty(self, slot: "Slot") -> None:
        self._wait(slot, EMPTY)

    def emptied(self, slot: "Slot") -> None:
        self._write(slot, EMPTY)

    def filled(self, slot: "Slot") -> None:
        self._write(slot, FULL)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
