"""Tensors over mapped memory, and slots handed over between copies and computation."""

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch

import ema
from ema.torch.handover import handover
from ema.torch.memory import Range, bytes_at, device_of


def test_a_tensor_over_a_slot_sees_what_is_fetched(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, client.granularity)
    hand, slot = handover(client), window[0]
    seen = bytes_at(client, slot.address, slot.size)
    hand.await_empty(slot)
    wanted = torch.arange(slot.size, device=device_of(client)).to(torch.uint8)
    seen.copy_(wanted)
    hand.filled(slot)
    program = client.program([region.step(slot)], store=True)
    program.start().wait(5.0)
    program.close()
    hand.await_empty(slot)
    seen.zero_()
    region.fetch(0, into=slot)
    hand.await_full(slot)
    assert torch.equal(seen, wanted)
    hand.emptied(slot)
    del seen
    window.close()


def test_ranges_share_a_tail_and_keep_their_heads(client: ema.Pool) -> None:
    grain = client.granularity
    window = client.window(1, grain)
    ranges = [Range(client, [2 * grain, window.handle]) for _ in range(3)]
    for number, one in enumerate(ranges):
        assert one.bytes.numel() == 3 * grain
        one.bytes.fill_(number + 1)
    for number, one in enumerate(ranges):
        head, tail = one.bytes[: 2 * grain], one.bytes[2 * grain :]
        assert bool((head == number + 1).all())
        assert bool((tail == 3).all())
        del head, tail
    for one in ranges:
        one.close()
    window.close()


def test_what_cannot_be_had_leaves_nothing(client: ema.Pool) -> None:
    free = client.driver.memory()[client.gpu].free
    with pytest.raises(ema.OutOfMemory):
        Range(client, [client.granularity, 1 << 40])
    with pytest.raises(ema.EmaError, match="the driver refused"):
        Range(client, [client.granularity, 1])
    assert client.driver.memory()[client.gpu].free == free


def test_another_connection_goes_on_while_the_first_one_waits(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, client.granularity)
    slot = window[0]
    slot.fill()
    waits = region.fetch(0, into=slot)
    with client.another("beside") as other:
        assert other.lease != client.lease
        assert other.gpu == client.gpu
        data = bytearray(b"goes on")
        held = other.region(other.chunk)
        held.store(bytes(data), at=0)
        held.fetch(0, into=data)
        assert data == b"goes on"
    assert not waits.done
    slot.release()
    waits.wait(5.0)
