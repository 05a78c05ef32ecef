"""A borrower in a process of its own: stores a pattern, fetches it back by programs, and prints figures as JSON.

`borrower.py SOCKET ROUNDS [hang]`: `hang` leaves a program waiting for a slot, says so, and sleeps.
"""

import json
import os
import sys
import time
from pathlib import Path

import ema
from ema_core import wire
from ema_driver.protocol import Wait, Write

MIB = 1 << 20
PIECE, PIECES, SLOTS = 16 * MIB, 32, 4


def content(piece: int, version: int) -> bytes:
    return (piece.to_bytes(4, "little") + version.to_bytes(4, "little")) * (PIECE // 8)


def main() -> None:
    rounds = int(sys.argv[2])
    with ema.connect(sys.argv[1]) as pool:
        region = pool.region(PIECE * PIECES, timeout=30)
        window = pool.window(SLOTS, PIECE)
        steps = [region.step(window[i % SLOTS], i * PIECE) for i in range(PIECES)]
        store, fetch = pool.program(steps, store=True), pool.program(steps)
        wrong = 0
        for version in range(rounds):
            run = store.start()
            for i in range(PIECES):
                slot = window[i % SLOTS]
                slot.wait_empty(10)
                pool.driver.write(slot.address, content(i, version))
                slot.fill()
            run.wait(10)
            run = fetch.start()
            for i in range(PIECES):
                slot = window[i % SLOTS]
                slot.wait(10)
                wrong += pool.driver.read(slot.address, PIECE) != content(i, version)
                slot.release()
            run.wait(10)

        # The GPU itself hands the slots over: nothing on the CPU between two pieces.
        stream = pool.driver.stream(pool.gpu)
        flags = [window[i % SLOTS].flag for i in range(PIECES)]
        use = stream.instantiate([op for p, w in flags for op in (Wait(p, w, wire.FULL), Write(p, w, wire.EMPTY))])
        runs = []
        began = time.monotonic()
        for _ in range(10 * rounds):
            runs.append(fetch.start())
            use.launch()
        ended = stream.synchronize(60)
        seconds = time.monotonic() - began
        runs[-1].wait(10)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
        who = {"uid": os.getuid(), "capabilities": status["CapEff"].strip()}
        gbs = 10 * rounds * PIECE * PIECES / seconds / 1e9
        print(json.dumps({"wrong": wrong, "ended": ended, "gbs": gbs, **who}))
        if sys.argv[3:] == ["hang"]:
            fetch.start()
            window[0].wait(10)
            print("hanging", flush=True)
            time.sleep(600)
        use.close()
        stream.close()


if __name__ == "__main__":
    main()
