"""Pinned memory through which the CPU reads and writes mapped addresses.

CUDA's own copies from ordinary memory make such a buffer when they are first used, and that can block behind a stream
that waits. This one is made with the session.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from ema_driver.cuda.api import Api, Raw
from ema_driver.cuda.gpus import Gpu
from ema_driver.errors import DriverError

SIZE: Final = 4 << 20
_PORTABLE: Final = 1


class Staging:
    """One pinned buffer of `SIZE` bytes; one use at a time, with the home GPU's context current."""

    def __init__(self, api: Api, home: Gpu) -> None:
        self._api, self._home = api, home
        with home.current():
            self._buffer = int(api.call("cuMemHostAlloc", SIZE, _PORTABLE))

    def read(self, stream: Raw, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes at these (address, size)."""
        for address, size in _cut(pieces):
            self._api.call("cuMemcpyDtoHAsync", self._buffer, address, size, stream)
            self._api.call("cuStreamSynchronize", stream)
            yield ctypes.string_at(self._buffer, size)

    def write(self, stream: Raw, pieces: Sequence[tuple[int, int]], data: bytes) -> None:
        """Put the bytes at these (address, size)."""
        view = memoryview(data)
        for address, size in _cut(pieces):
            ctypes.memmove(self._buffer, bytes(view[:size]), size)
            view = view[size:]
            self._api.call("cuMemcpyHtoDAsync", address, self._buffer, size, stream)
            self._api.call("cuStreamSynchronize", stream)

    def close(self) -> None:
        """Give the buffer up."""
        with suppress(DriverError), self._home.current():
            self._api.call("cuMemFreeHost", self._buffer)


def _cut(pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for address, size in pieces:
        for offset in range(0, size, SIZE):
            yield address + offset, min(SIZE, size - offset)
