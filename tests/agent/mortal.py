"""Clients that die: `mortal.py SOCKET GPU` forks one for every step of a borrower's life, killed right after it.

A step is a message; those that are answered are not waited for, so that the client is dead while the agent works on it.
One line of output for each death.
"""

import os
import signal
import sys
from collections.abc import Callable

import ema
from ema_core import wire

CHUNK = 256 << 10


def life(socket: str, gpu: str) -> list[Callable[[], object]]:
    """The steps; each one may use what those before it made."""
    made: dict[str, object] = {}

    def connect() -> None:
        made["pool"] = ema.connect(socket, gpu=gpu)

    def pool() -> ema.Pool:
        found = made["pool"]
        assert isinstance(found, ema.Pool)
        return found

    def window() -> None:
        made["window"] = pool().window(4, CHUNK // 4)

    def region() -> None:
        made["region"] = pool().region(12 * CHUNK)

    def program(store: bool) -> Callable[[], None]:
        def make() -> None:
            window, region = made["window"], made["region"]
            assert isinstance(window, ema.Window)
            assert isinstance(region, ema.Region)
            steps = [region.step(window[i % 4], at=i * CHUNK) for i in range(12)]
            made["program"] = pool().program(steps, store=store)

        return make

    def start() -> None:
        found = made["program"]
        assert isinstance(found, ema.Program)
        found.start()

    def fill() -> None:
        found = made["window"]
        assert isinstance(found, ema.Window)
        found[0].fill()

    def submit(make: Callable[[int], wire.ClientMessage]) -> Callable[[], None]:
        return lambda: made.update(answer=pool()._channel.submit(make))

    return [
        connect,
        submit(lambda i: wire.GrowRegion(i, 7, 8 * CHUNK, False, 5.0)),
        window,
        region,
        program(store=True),
        start,
        fill,
        submit(lambda i: wire.CloseProgram(i, 0)),
        program(store=False),
        start,
        submit(lambda i: wire.GrowRegion(i, 8, 4 * CHUNK, True, 5.0)),
        submit(lambda i: wire.GrowRegion(i, 9, 100 << 20, False, 60.0)),
        submit(lambda i: wire.ShrinkRegion(i, 8, CHUNK)),
        submit(lambda i: wire.ShrinkRegion(i, 7, 0)),
        submit(lambda i: wire.GrowShare(i, 30 << 20, 5.0)),
        lambda: made.update(share=pool().share(8 << 20)),
        submit(lambda i: wire.RenewRegion(i, 8, 5.0)),
        lambda: pool()._channel.send(wire.Goodbye()),
    ]


def main() -> None:
    """Fork, die, tell."""
    socket, gpu = sys.argv[1:3]
    count = len(life(socket, gpu))
    for last in range(count):
        pid = os.fork()
        if pid == 0:
            for step in life(socket, gpu)[: last + 1]:
                step()
            os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(last, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, flush=True)


if __name__ == "__main__":
    main()
