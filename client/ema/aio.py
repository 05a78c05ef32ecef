"""`ema` in an event loop: the calls that wait, as coroutines.

    pool = await ema.aio.connect()
    region = await ema.aio.region(pool, 1 << 30)
    region.fetch(at=0, into=window[0])
    data = await ema.aio.wait(window[0])

Everything else of `ema` returns at once and is called as it is; tickets are awaited directly. Each wait takes a thread
of ema's own, asleep until its copies have ended, so that the loop's default threads are not used up by waiting.
Cancelling an await gives the waiting up; the copies go on.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

import ema

P = ParamSpec("P")
T = TypeVar("T")
MOST: Final = 256
"""Waits at one time; more of them queue."""
_threads = ThreadPoolExecutor(MOST, thread_name_prefix="ema-aio")


async def in_thread(call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Any call of `ema` that may wait (`region.grow`, `share.grow`, `region.renew`, …), on a thread of ema's own."""
    return await asyncio.get_running_loop().run_in_executor(_threads, functools.partial(call, *args, **named))


async def connect(
    socket: str | None = None,
    *,
    gpu: str | int | None = None,
    name: str = "",
    pool: str = "",
    timeout: float = 5.0,  # noqa: ASYNC109 - as in `ema.connect`
) -> ema.Pool:
    """`ema.connect`."""
    return await in_thread(ema.connect, socket, gpu=gpu, name=name, pool=pool, timeout=timeout)


async def region(
    pool: ema.Pool,
    size: int,
    *,
    droppable: bool = False,
    timeout: float = 2.0,  # noqa: ASYNC109 - the agent ends it, with the place in the queue
) -> ema.Region:
    """`Pool.region`."""
    return await in_thread(pool.region, size, droppable=droppable, timeout=timeout)


async def wait(slot: ema.Slot, timeout: float | None = None) -> memoryview | None:  # noqa: ASYNC109
    """`Slot.wait`."""
    return slot.wait(timeout) if slot.full else await in_thread(slot.wait, timeout)


async def wait_empty(slot: ema.Slot, timeout: float | None = None) -> memoryview | None:  # noqa: ASYNC109
    """`Slot.wait_empty`."""
    return await in_thread(slot.wait_empty, timeout) if slot.full else slot.wait_empty(timeout)


async def fetch(region: ema.Region, at: int, into: bytearray | memoryview) -> None:
    """`Region.fetch` into a buffer."""
    await in_thread(region.fetch, at, into)


async def store(region: ema.Region, source: bytes | bytearray | memoryview, at: int) -> None:
    """`Region.store` from a buffer."""
    await in_thread(region.store, source, at)
