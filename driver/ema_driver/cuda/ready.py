"""Operations made ready once and started many times: as a list of calls, or as a graph."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ema_driver.cuda.api import Raw
from ema_driver.cuda.space import Space
from ema_driver.errors import ContextLost, InvalidUse

Prepared = tuple[Callable[..., Raw], tuple[Raw, ...]]
"""A driver function with its arguments."""


class Queueing(Protocol):
    """The stream that they run on."""

    def make(self, calls: Sequence[Prepared]) -> None:
        """Append operations by calls that are ready."""
        ...

    def launch(self, executable: Raw) -> None:
        """Append a graph."""
        ...

    def destroy_graph(self, executable: Raw) -> None:
        """Destroy a graph."""
        ...


class CudaCalls:
    """Operations made ready as a list of calls. Made by `CudaStream.instantiate`."""

    def __init__(self, stream: Queueing, space: Space, calls: list[Prepared], spans: Sequence[tuple[int, int]]) -> None:
        """`spans` are the addresses and sizes that they touch."""
        self._stream, self._space, self._spans = stream, space, spans
        self._calls: list[Prepared] | None = calls
        self._looked = -1
        """The space's number when all of them were last seen mapped."""

    def launch(self) -> None:
        """Append the operations to the stream. Never blocks while few launches are outstanding; allocates nothing.

        Raises NotMapped with nothing queued.
        """
        if self._calls is None:
            raise InvalidUse("the graph is closed")
        with self._space.steady() as number:
            if number != self._looked:
                self._space.check(self._spans)
                self._looked = number
            self._stream.make(self._calls)

    def close(self) -> None:
        """Give the operations up."""
        self._calls = None


class CudaGraph:
    """Operations made ready. Made by `CudaStream.instantiate`."""

    def __init__(self, stream: Queueing, executable: Raw) -> None:
        self._stream, self._executable = stream, executable

    def launch(self) -> None:
        """Append the operations to the stream. Never blocks while few launches are outstanding; allocates nothing."""
        if self._executable is None:
            raise InvalidUse("the graph is closed")
        self._stream.launch(self._executable)

    def close(self) -> None:
        """Give the graph up."""
        if self._executable is not None:
            executable, self._executable = self._executable, None
            with suppress(ContextLost):
                self._stream.destroy_graph(executable)
