"""From an event loop: tickets are awaited, waits are coroutines, and the loop goes on meanwhile."""

import asyncio
import gc

import pytest

import ema
import ema.aio
from nodes import Node, pattern


def test_many_waits_at_once_leave_the_loop_free(shared_node: Node) -> None:
    async def main() -> None:
        pool = await ema.aio.connect(shared_node.socket, gpu=shared_node.gpus[0])
        region = await ema.aio.region(pool, 4 * pool.chunk)
        await ema.aio.store(region, pattern(1, region.size), at=0)
        window = pool.window(64, 4096)
        waits = [asyncio.ensure_future(ema.aio.wait(slot)) for slot in window.slots]
        for slot in window.slots:
            await region.fetch(slot.number * 4096 % region.size, into=slot)
        for slot, view in zip(window.slots, await asyncio.gather(*waits), strict=True):
            at = slot.number * 4096 % region.size
            assert bytes(view or b"") == pattern(1, region.size)[at : at + 4096]
            slot.release()
            await ema.aio.wait_empty(slot)
        found = bytearray(100)
        await ema.aio.fetch(region, 5, found)
        assert found == pattern(1, region.size)[5:105]
        with pytest.raises(ema.TimedOut):
            await ema.aio.wait(window[0], timeout=0.01)
        with pytest.raises(ema.LimitReached):
            await ema.aio.region(pool, pool.limit + pool.chunk)
        assert await ema.aio.in_thread(region.renew) == []
        await ema.aio.in_thread(pool.close)

    asyncio.run(main())
    gc.collect()  # simulated memory stays as long as anybody has a view of it
