"""Pairs: does a path that the driver claims carry bytes.

"Peer access possible" may be a lie: the write may be dropped, corrupted, or never end. So every ordered pair is tried
with a pattern before anything is lent over it, in a child process: a probe that hangs is killed, its pair is barred,
and the next child goes on behind it.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ema_core.ids import HOST, GpuId, Place
from ema_driver import open_node
from ema_driver.errors import DriverError
from ema_driver.protocol import Copy, Link, MemoryDriver

LIMIT: Final = 3.0
"""Seconds for one pair, and for the child to start."""
PATTERN: Final = bytes(range(1, 252))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the test of one pair found. `why` is empty for a good one."""

    source: Place
    target: Place
    rate: int
    why: str = ""


async def verify(driver: str, endpoint: str, links: Sequence[Link], limit: float = LIMIT) -> list[Verdict]:
    """Test every claimed pair, in children with a time limit."""
    verdicts: list[Verdict] = []
    left = list(links)
    while left:
        found = await _one_child(driver, endpoint, left, limit)
        verdicts += found
        left = left[len(found) :]
    return verdicts


async def _one_child(driver: str, endpoint: str, links: Sequence[Link], limit: float) -> list[Verdict]:
    """Verdicts for the first of these links, at least one: until the child ends, or hangs and is killed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ema_agent.pairs", driver, endpoint,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018 - both are pipes
    found: list[Verdict] = []
    try:
        child.stdin.write(json.dumps([(k.source, k.target) for k in links]).encode())
        child.stdin.close()
        for link in links:
            try:
                line = await asyncio.wait_for(child.stdout.readline(), limit)
                why = json.loads(line) if line else "the test process died"
            except TimeoutError:
                why = f"the test did not end in {limit:g} s"
                line = b""
            found.append(Verdict(link.source, link.target, link.rate, why))
            if not line:
                break
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    return found


def probe(driver: MemoryDriver, source: Place, target: Place, home: GpuId) -> str:
    """Copy a pattern over a pair and look at what arrived; the reason if it is no good, else nothing."""
    size = max(driver.granularity(source), driver.granularity(target))
    pattern = (PATTERN * (size // len(PATTERN) + 1))[:size]
    try:
        handles = [driver.create(source, size), driver.create(target, size)]
        ends = [driver.reserve(size), driver.reserve(size)]
        driver.map(list(zip(ends, handles, strict=True)))
        driver.write(ends[0], pattern)
        driver.write(ends[1], bytes(size))
        stream = driver.stream(home)
        stream.enqueue([Copy(int(ends[1]), int(ends[0]), size)])
        if not stream.synchronize(10 * LIMIT):
            return "the copy did not end"
        arrived = driver.read(ends[1], size)
        stream.close()
        driver.unmap(ends)
        driver.unreserve(ends)
        driver.release(handles)
    except DriverError as error:
        return f"the copy failed: {error}"
    if arrived != pattern:
        wrong = sum(1 for a, b in zip(arrived, pattern, strict=True) if a != b)
        return f"{wrong} of {size} bytes were wrong after a copy that reported success"
    return ""


def main() -> None:
    """The child: pairs come in on standard input, one line goes out for each."""
    name, endpoint = sys.argv[1:3]
    with open_node(name, endpoint) as driver:
        for source, target in json.load(sys.stdin):
            home = GpuId(Place(next(p for p in (source, target) if p != HOST)))
            sys.stdout.write(json.dumps(probe(driver, Place(source), Place(target), home)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
