"""A borrower in a process of its own: `borrower.py SOCKET GPU`, one JSON list a line asks, one JSON value answers.

Its bytes are patterned by chunk and version, so that it can tell a wrong byte from a right one by itself.
"""

import json
import sys
import threading
from array import array
from typing import Any

SLOT = 64 << 10


def pattern(seed: int, size: int) -> bytes:
    """`size` bytes, a multiple of 8, that tell from which seed and from where they are."""
    first = (seed & 0xFFFFFFFF) << 32
    return array("Q", range(first, first + size // 8)).tobytes()


class Borrower:
    """What the commands do. Regions are numbered in the order in which they were asked for."""

    def __init__(self, socket: str, gpu: str) -> None:
        import ema

        self.ema = ema
        self.pool = ema.connect(socket, gpu=gpu)
        self.regions: list[Any] = []
        self.steps = self.wrong = 0
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    def region(self, size: int, droppable: bool = False, timeout: float = 5.0) -> int:
        """Borrow."""
        self.regions.append(self.pool.region(size, droppable=droppable, timeout=timeout))
        return len(self.regions) - 1

    def fill(self, number: int, version: int) -> bool:
        """Store a pattern into every chunk."""
        region, chunk = self.regions[number], self.pool.chunk
        for index in range(region.size // chunk):
            region.store(pattern(version * 4096 + index, chunk), at=index * chunk)
        return True

    def check(self, number: int, version: int) -> list[int]:
        """Chunks that do not hold the pattern."""
        region, chunk = self.regions[number], self.pool.chunk
        wrong = []
        for index in range(region.size // chunk):
            back = bytearray(chunk)
            region.fetch(index * chunk, back)
            if back != pattern(version * 4096 + index, chunk):
                wrong.append(index)
        return wrong

    def run(self, number: int, version: int) -> bool:
        """From now on fetch all chunks again and again as a program, and check them, until `halt`."""
        program, window, parts = self._program(number)
        first = program.start()

        def work() -> None:
            ticket = first
            while not self._halt.is_set():
                ahead = program.start()
                self._step(window, parts, version)
                ticket.wait(20)
                ticket = ahead
                self.steps += 1
            self._step(window, parts, version)
            ticket.wait(20)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return True

    def _program(self, number: int) -> tuple[Any, Any, list[tuple[int, int]]]:
        region, chunk = self.regions[number], self.pool.chunk
        window = self.pool.window(4, SLOT)
        # The first piece of each chunk: many chunks a step with little to copy.
        parts = [(index, index % 4) for index in range(region.size // chunk)]
        steps = [region.step(window[slot], at=index * chunk) for index, slot in parts]
        return self.pool.program(steps), window, parts

    def _step(self, window: Any, parts: list[tuple[int, int]], version: int) -> None:  # noqa: ANN401
        for index, slot in parts:
            view = window[slot].wait(20)
            if view != pattern(version * 4096 + index, SLOT):
                self.wrong += 1
            window[slot].release()

    def halt(self) -> list[int]:
        """End the program: steps made, and slots that held wrong bytes."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join(20)
            assert not self._thread.is_alive()
        return [self.steps, self.wrong]

    def made(self) -> int:
        """Steps made so far."""
        return self.steps

    def hang(self, number: int) -> bool:
        """Start two runs and never hand a slot back."""
        program, _, _ = self._program(number)
        program.start()
        program.start()
        return True


def main() -> None:
    """Answer until the input ends."""
    me = Borrower(*sys.argv[1:])
    for line in sys.stdin:
        do, *values = json.loads(line)
        print(json.dumps(getattr(me, do)(*values)), flush=True)
    me.pool.close()


if __name__ == "__main__":
    main()
