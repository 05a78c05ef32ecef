"""Physical memory: create, map, hand over, give back; free bytes count what anybody still holds."""

import os
import random
import signal
import time

import pytest

from driver.conftest import Backend, peer
from driver.gates import window
from driver.peer import pattern
from ema_core.ids import HOST, GpuId
from ema_driver.errors import InvalidUse, OutOfMemory
from ema_driver.protocol import Address, Copy, MemoryDriver


def free(driver: MemoryDriver, gpu: GpuId) -> int:
    return driver.memory()[gpu].free


def test_every_gpu_and_the_host_report_amounts_that_add_up(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    memory = driver.memory()
    assert set(memory) == {*gpus, HOST}
    for info in memory.values():
        assert info.free + info.used + info.reserved == info.total


def test_new_memory_is_zero_and_takes_free_bytes_until_unmapped_and_released(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    before = free(driver, gpus[0])
    address, handle = window(driver, gpus[0], unit)
    assert driver.read(address, unit) == bytes(unit)
    assert (handle.place, handle.size) == (gpus[0], unit)
    assert free(driver, gpus[0]) == backend.about(before - unit)
    driver.release([handle])
    assert free(driver, gpus[0]) == backend.about(before - unit), "a mapping holds the memory"
    driver.unmap([address])
    assert free(driver, gpus[0]) == backend.about(before)
    driver.unreserve([address])


def test_memory_that_was_used_before_is_zero(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    for place in (gpus[0], HOST):
        at = driver.reserve(unit)
        for _ in range(3):
            handle = driver.create(place, unit)
            driver.map([(at, handle)])
            assert driver.read(at, unit) == bytes(unit)
            driver.write(at, pattern(5, 1, unit))
            driver.unmap([at])
            driver.release([handle])


def test_zeroed_in_part(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    for place in (gpus[0], HOST):
        address, handle = window(driver, place, unit)
        data = pattern(5, 1, unit)
        driver.write(address, data)
        driver.zero(address + 64, unit // 2)
        assert driver.read(address, unit) == data[:64] + bytes(unit // 2) + data[64 + unit // 2 :]
        driver.zero(address, 0)
        with pytest.raises(InvalidUse):
            driver.zero(address + unit, 1)
        driver.unmap([address])
        driver.unreserve([address])
        driver.release([handle])


def test_one_memory_mapped_at_two_addresses_shows_the_same_bytes(
    driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    first, handle = window(driver, gpus[0], unit)
    second = driver.reserve(2 * unit)
    driver.map([(Address(second + unit), handle)])
    driver.write(first + 5, b"bytes")
    assert driver.read(second + unit + 5, 5) == b"bytes"


def test_reads_and_writes_run_over_adjacent_mappings(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    at = driver.reserve(2 * unit)
    driver.map([(at, driver.create(gpus[0], unit)), (Address(at + unit), driver.create(HOST, unit))])
    driver.write(at + unit - 3, b"abcdef")
    assert driver.read(at + unit - 3, 6) == b"abcdef"
    to, _ = window(driver, gpus[0], unit)
    stream = driver.stream(gpus[0])
    stream.enqueue([Copy(to + 1, at + unit - 3, 6)])
    assert stream.synchronize(5)
    assert driver.read(to, 8) == b"\0abcdef\0"


def test_out_of_memory_says_what_is_free_and_takes_nothing(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId]
) -> None:
    before = free(driver, gpus[0])
    room = before - before % driver.granularity(gpus[0])
    with pytest.raises(OutOfMemory) as error:
        driver.create(gpus[0], room + driver.granularity(gpus[0]))
    assert error.value.place == gpus[0]
    assert error.value.free == backend.about(before)
    assert free(driver, gpus[0]) == backend.about(before)
    driver.release([driver.create(gpus[0], room - backend.margin)])


@pytest.mark.parametrize("size", [0, -1, 1, 4097])
def test_sizes_that_are_no_multiple_of_the_granularity_are_refused(
    driver: MemoryDriver, gpus: list[GpuId], size: int
) -> None:
    with pytest.raises(InvalidUse, match=str(size)):
        driver.create(gpus[0], size)
    with pytest.raises(InvalidUse, match=str(size)):
        driver.reserve(size)


def test_batches_do_all_or_nothing(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    at = driver.reserve(2 * unit)
    first, second = driver.create(gpus[0], unit), driver.create(gpus[0], unit)
    with pytest.raises(InvalidUse):
        driver.map([(at, first), (at, second)])
    driver.map([(at, first), (Address(at + unit), second)])
    with pytest.raises(InvalidUse):
        driver.unmap([at, Address(at + 4096)])
    with pytest.raises(InvalidUse):
        driver.unmap([at, at])
    assert driver.read(at, 2 * unit) == bytes(2 * unit)
    with pytest.raises(InvalidUse):
        driver.release([first, first])
    driver.release([first])
    with pytest.raises(InvalidUse):
        driver.release([second, first])
    with pytest.raises(InvalidUse):
        driver.unreserve([at])
    driver.unmap([at, Address(at + unit)])
    driver.map([(at, second)])


def test_many_pieces_are_made_in_one_call_and_are_each_their_own(
    driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    handles = driver.create_many(gpus[0], unit, 3)
    addresses = driver.reserve_many(unit, 3)
    assert len({id(h) for h in handles}) == len(set(addresses)) == 3
    assert {(h.place, h.size) for h in handles} == {(gpus[0], unit)}
    driver.map(list(zip(addresses, handles, strict=True)))
    driver.write(addresses[1], pattern(3, 1, unit))
    assert [driver.read(a, unit) for a in addresses] == [bytes(unit), pattern(3, 1, unit), bytes(unit)]
    driver.unmap([addresses[0]])
    driver.unreserve([addresses[0]])
    driver.release([handles[0]])
    assert driver.read(addresses[1], unit) == pattern(3, 1, unit)
    assert not driver.create_many(gpus[0], unit, 0)
    assert not driver.reserve_many(unit, 0)
    for refused in (lambda: driver.create_many(gpus[0], unit, -1), lambda: driver.reserve_many(unit, -1)):
        with pytest.raises(InvalidUse, match="-1"):
            refused()


def test_many_pieces_are_made_all_or_none(backend: Backend, driver: MemoryDriver, gpus: list[GpuId]) -> None:
    before = free(driver, gpus[0])
    piece = max(driver.granularity(gpus[0]), before // 4 // driver.granularity(gpus[0]) * driver.granularity(gpus[0]))
    with pytest.raises(OutOfMemory) as error:
        driver.create_many(gpus[0], piece, 6)
    assert error.value.place == gpus[0]
    assert free(driver, gpus[0]) == backend.about(before)
    driver.release(driver.create_many(gpus[0], piece, 2))


def test_a_released_or_foreign_handle_cannot_be_used(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    at = driver.reserve(unit)
    handle = driver.create(gpus[0], unit)
    with backend.connect() as other, pytest.raises(InvalidUse):
        other.export(handle)
    driver.release([handle])
    for use in (lambda: driver.map([(at, handle)]), lambda: driver.export(handle), lambda: driver.release([handle])):
        with pytest.raises(InvalidUse):
            use()


def test_hundreds_of_mappings_at_once(driver: MemoryDriver, gpus: list[GpuId]) -> None:
    size = driver.granularity(gpus[0])
    handles = [driver.create(gpus[0], size) for _ in range(256)]
    at = driver.reserve(size * 256)
    addresses = [Address(at + i * size) for i in range(256)]
    driver.map(list(zip(addresses, handles, strict=True)))
    driver.write(at + 200 * size, b"here")
    assert driver.read(at + 200 * size, 4) == b"here"
    driver.unmap(addresses)
    driver.release(handles)


def test_memory_of_a_killed_process_lives_on_in_a_descriptor(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    before = free(driver, gpus[0])
    with peer("create", backend) as creator:
        creator.tell(str(unit))
        _, (fd,) = creator.hear()
        creator.send(signal.SIGKILL)
        creator.process.wait()
    assert free(driver, gpus[0]) == backend.about(before - unit)
    handle = driver.adopt(fd, unit)
    assert (handle.place, handle.size) == (gpus[0], unit)
    at = driver.reserve(unit)
    driver.map([(at, handle)])
    assert driver.read(at, unit) == pattern(7, 1, unit)
    driver.unmap([at])
    driver.release([handle])
    assert free(driver, gpus[0]) == backend.about(before - unit), "the descriptor still holds it"
    with peer("hold", backend) as holder:
        holder.tell("hold", fd)
        holder.hear()
        os.close(fd)
        assert free(driver, gpus[0]) == backend.about(before - unit), "another process holds it"
        holder.send(signal.SIGKILL)
        holder.process.wait()
        assert free(driver, gpus[0]) == backend.about(before)


def test_what_only_a_dead_process_held_makes_room_for_a_creation(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    room = free(driver, gpus[0]) - backend.margin
    room -= room % driver.granularity(gpus[0])
    handle = driver.create(gpus[0], room)
    fd = driver.export(handle)
    with peer("hold", backend) as holder:
        holder.tell("hold", fd)
        holder.hear()
        os.close(fd)
        driver.release([handle])
        with pytest.raises(OutOfMemory):
            driver.create(gpus[0], backend.margin + unit)
        holder.send(signal.SIGKILL)
        holder.process.wait()
        driver.release([driver.create(gpus[0], room)])


def test_a_process_killed_at_any_moment_leaves_nothing(backend: Backend, driver: MemoryDriver) -> None:
    before = driver.memory()
    rand = random.Random(3)
    for _ in range(8):
        with peer("churn", backend) as other:
            other.hear()
            time.sleep(rand.uniform(0, 0.03))  # the moment is what varies
            other.send(signal.SIGKILL)
            other.process.wait()
        end = time.monotonic() + 5
        while backend.taken(before, driver.memory()):
            assert time.monotonic() < end, "bytes of a dead process are still taken"


def test_adopt_refuses_what_is_no_memory_of_this_driver(driver: MemoryDriver, gpus: list[GpuId], unit: int) -> None:
    page = driver.words(16)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.ftruncate(plain, unit)
    read, write = os.pipe()
    device = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    own = driver.export(driver.create(gpus[0], unit))
    try:
        for fd in (plain, read, device, page.fileno()):
            with pytest.raises(InvalidUse, match="adopt"):
                driver.adopt(fd, unit)
        for size in (0, unit - 4096, unit - driver.granularity(gpus[0]), 2 * unit):
            with pytest.raises(InvalidUse, match=str(size)):
                driver.adopt(own, size)
        with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
            os.ftruncate(own, 0)
        assert not os.get_inheritable(own)
    finally:
        for fd in (plain, read, write, device, own):
            os.close(fd)
        page.close()


def test_closing_a_session_gives_everything_back(
    backend: Backend, driver: MemoryDriver, gpus: list[GpuId], unit: int
) -> None:
    before = free(driver, gpus[0])
    with backend.connect() as other:
        window(other, gpus[0], unit)
        other.release([window(other, HOST, unit)[1]])
        other.words(4)
        other.stream(gpus[0])
        assert free(driver, gpus[0]) == backend.about(before - unit)
    other.close()
    assert free(driver, gpus[0]) == backend.about(before)
