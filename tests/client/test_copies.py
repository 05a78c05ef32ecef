"""Store and fetch: every byte, at any offset, by slots, buffers and programs, while others take and give back."""

import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ema
from ema_core import wire
from nodes import KIB, Node, pattern


def wait(slot: ema.Slot) -> bytes:
    return bytes(slot.wait(10.0) or b"")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_buffers_at_any_offset_and_size(client: ema.Pool, data: st.DataObject) -> None:
    size = 5 * client.chunk
    region = client.region(size)
    model = bytearray(size)
    for _ in range(4):
        at = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, min(size - at, 3 * client.chunk)))
        piece = random.Random(at).randbytes(length)
        region.store(piece, at=at)
        model[at : at + length] = piece
        begin = data.draw(st.integers(0, size - 1))
        found = bytearray(data.draw(st.integers(1, size - begin)))
        region.fetch(begin, found)
        assert found == model[begin : begin + len(found)]
    region.close()


def test_slots_at_any_offset_across_chunks(client: ema.Pool) -> None:
    region, window = client.region(4 * client.chunk), client.window(2, 3 * client.chunk // 2)
    whole = pattern(7, region.size)
    region.store(whole, at=0)
    for at in (0, 1, client.chunk - 1, client.chunk, client.chunk + 4095, 2 * client.chunk):
        region.fetch(at, into=window[0])
        assert wait(window[0]) == whole[at : at + window[0].size]
        window[0].release()
    window[1].view[:] = pattern(8, window[1].size)
    region.store(window[1], at=1000, size=client.chunk)
    window[1].wait_empty(5.0)
    found = bytearray(region.size)
    region.fetch(0, found)
    assert found == whole[:1000] + pattern(8, window[1].size)[: client.chunk] + whole[1000 + client.chunk :]


def test_a_store_is_done_with_its_slot_when_its_ticket_has_ended(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, 4096)
    window[0].view[:] = b"a" * 4096
    ticket = region.store(window[0], at=0)
    ticket.wait(5.0)
    assert ticket.done
    assert not window[0].full
    found = bytearray(4096)
    region.fetch(0, found)
    assert found == b"a" * 4096


def test_a_program_over_many_steps_while_others_take_and_give_back(shared_node: Node, client: ema.Pool) -> None:
    """GPU memory comes and goes on every lender meanwhile; no byte is wrong."""
    chunks, size = 16, client.chunk
    region, window = client.region(chunks * size), client.window(4, size)
    wanted = [pattern(i, size) for i in range(chunks)]
    for i, data in enumerate(wanted):
        region.store(data, at=i * size)
    program = client.program([region.step(window[i % 4], i * size) for i in range(chunks)])
    stop = threading.Event()
    driver = shared_node.observer

    def press() -> None:
        chance = random.Random(3)
        while not stop.is_set():
            gpu = shared_node.gpus[chance.randrange(1, 4)]
            free = driver.memory()[gpu].free
            handle = driver.create(gpu, max(4096, (free - 256 * KIB) // 4096 * 4096))
            stop.wait(0.02)
            driver.release([handle])

    thread = threading.Thread(target=press)
    thread.start()
    try:
        program.start()
        for step in range(25):
            ticket = program.start() if step < 24 else None
            for i, data in enumerate(wanted):
                slot = window[i % 4]
                assert wait(slot) == data, f"step {step}, chunk {i}"
                slot.release()
            del ticket
    finally:
        stop.set()
        thread.join()
    program.close()


def test_a_program_that_stores(client: ema.Pool) -> None:
    region, window = client.region(4 * client.chunk), client.window(2, 4096)
    program = client.program([region.step(window[i % 2], i * client.chunk) for i in range(4)], store=True)
    for step in range(5):
        ticket = program.start()
        for i in range(4):
            slot = window[i % 2]
            slot.wait_empty(5.0)
            slot.view[:] = pattern(10 * step + i, 4096)
            slot.fill()
        ticket.wait(5.0)
        for i in range(4):
            found = bytearray(4096)
            region.fetch(i * client.chunk, found)
            assert found == pattern(10 * step + i, 4096)
    program.close()


def test_a_new_program_with_an_old_number_is_not_done_before_it_began(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, 4096)
    for round_ in range(3):
        program = client.program([region.step(window[0])])
        for _ in range(4):
            ticket = program.start()
            window[0].wait(5.0)
            ticket.wait(5.0)
            window[0].release()
        window[0].fill()
        ticket = program.start()
        assert not ticket.done, f"round {round_}: its slot is full, it cannot have run"
        window[0].release()
        ticket.wait(5.0)
        window[0].release()
        program.close()


def test_slots_of_a_new_window_are_empty(client: ema.Pool) -> None:
    """Else a wait would end at once, with bytes that nobody fetched."""
    region, window = client.region(client.chunk), client.window(1, 4096)
    region.fetch(0, into=window[0])
    window[0].wait(5.0)
    window.close()
    again = client.window(1, 4096)
    assert again[0].number == 0
    assert not again[0].full
    with pytest.raises(ema.TimedOut):
        again[0].wait(0.01)


def test_closing_right_after_the_last_slot(client: ema.Pool) -> None:
    """The run's end is told a moment after its last slot: no reason to refuse."""
    region = client.region(client.chunk)
    for _ in range(60):
        window = client.window(1, 4096)
        program = client.program([region.step(window[0])])
        program.start()
        window[0].wait(5.0)
        program.close()
        window[0].release()
        region.fetch(0, into=window[0])
        window[0].wait(5.0)
        window.close()


def test_more_than_two_runs_wait_for_their_turn(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, 4096)
    tickets: list[ema.Ticket] = []
    thread = threading.Thread(target=lambda: tickets.extend(region.fetch(0, into=window[0]) for _ in range(6)))
    thread.start()
    for _ in range(6):
        window[0].wait(5.0)
        window[0].release()
    thread.join(5)
    for ticket in tickets:
        ticket.wait(5.0)
    assert len(tickets) == 6


def test_a_refused_run_ends_its_wait_with_the_reason_and_the_pool_goes_on(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, 4096)
    ticket = client.run([wire.CopyStep(999, 0, 4096, window[0].number)], store=False)
    with pytest.raises(ema.BadInput, match="region"):
        ticket.wait(5.0)
    with pytest.raises(ema.BadInput, match="region"):
        window[0].wait(5.0)
    region.fetch(0, into=window[0])
    assert wait(window[0]) == bytes(4096)


def test_waiting_is_measured(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, 4096)
    region.fetch(0, into=window[0])
    window[0].wait(5.0)
    before = client.exposed_wait
    with pytest.raises(ema.TimedOut):
        window[0].wait_empty(0.05)
    assert 0.045 <= client.exposed_wait - before < 1.0


def test_threads_with_slots_of_their_own(client: ema.Pool) -> None:
    """Eight threads copy, make and close things at once, on one pool."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            chance = random.Random(number)
            region, window = client.region(2 * client.chunk), client.window(1, 4096)
            for i in range(12):
                at = chance.randrange(2 * client.chunk - 4096)
                window[0].view[:] = pattern(100 * number + i, 4096)
                region.store(window[0], at=at).wait(10.0)
                region.fetch(at, into=window[0])
                assert wait(window[0]) == pattern(100 * number + i, 4096)
                window[0].release()
                found = bytearray(100)
                region.fetch(at, found)
                assert found == pattern(100 * number + i, 4096)[:100]
            window.close()
            region.close()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures, failures


def test_threads_that_start_one_program(client: ema.Pool) -> None:
    region, window = client.region(client.chunk), client.window(1, 4096)
    program = client.program([region.step(window[0])])
    done: list[ema.Ticket] = []

    def starts() -> None:
        for _ in range(10):
            ticket = program.start()
            ticket.wait(20.0)
            done.append(ticket)

    threads = [threading.Thread(target=starts) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(30):
        window[0].wait(10.0)
        window[0].release()
    for t in threads:
        t.join(10)
    assert len(done) == 30
    program.close()
