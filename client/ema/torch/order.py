"""The order of a GPU's work: what a thread has queued, on whichever stream, and when all of it is done."""

from typing import Protocol

import torch

from ema.torch.handles import UNDO, Streamed


class Order(Protocol):
    """Of one device."""

    def follow(self) -> None:
        """What is queued from now on, on whichever stream is current, runs after what was queued before.

        Raises Streamed while a graph is captured.
        """
        ...

    def settle(self) -> None:
        """Wait until all that was queued has run."""
        ...

    def idle(self) -> bool:
        """Whether all that was queued on the stream that was current last has run. Does not wait."""
        ...

    def trim(self) -> None:
        """Give memory back to the device that torch keeps for later."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...


def order(device: torch.device) -> Order:
    """How work on this device is ordered."""
    return _Streams(device) if device.type == "cuda" else _AtOnce()


class _AtOnce:
    """The CPU: what is asked for is done."""

    def follow(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def idle(self) -> bool:
        return True

    def trim(self) -> None:
        pass

    def capturing(self) -> bool:
        return False


class _Streams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        if self.capturing():
            raise Streamed(f"a streamed layer cannot be captured into a graph; {UNDO}")
        current = torch.cuda.current_stream(self._device)
        if current != self._last:
            if self._last is not None:
                current.wait_stream(self._last)
            self._last = current

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def idle(self) -> bool:
        return self._last is None or bool(self._last.query())

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())
