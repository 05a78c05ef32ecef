"""Hostile programs and runs: steps out of range, runs of nothing, out of order, or too many."""

import pytest

from ema_core import wire
from wire.conftest import Target
from wire.hostile import HUGE, STEP, refused


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (wire.CopyStep(9, 0, 4096, 0), "steps[0].region"),
        (wire.CopyStep(-1, 0, 4096, 0), "steps[0].region"),
        (wire.CopyStep(HUGE, 0, 4096, 0), "steps[0].region"),
        (wire.CopyStep(0, -1, 4096, 0), "steps[0].at"),
        (wire.CopyStep(0, HUGE, 4096, 0), "steps[0].at"),
        (wire.CopyStep(0, 2 << 18, 1, 0), "steps[0].at"),
        (wire.CopyStep(0, (2 << 18) - 1, 2, 0), "steps[0].at"),
        (wire.CopyStep(0, 0, 0, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, -1, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, 4097, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, HUGE, 0), "steps[0].size"),
        (wire.CopyStep(0, 0, 4096, 0, 1), "steps[0].size"),
        (wire.CopyStep(0, 0, 1, 0, -1), "steps[0].size"),
        (wire.CopyStep(0, 0, 1, 0, HUGE), "steps[0].size"),
        (wire.CopyStep(0, 0, 4096, 2), "steps[0].slot"),
        (wire.CopyStep(0, 0, 4096, -1), "steps[0].slot"),
        (wire.CopyStep(0, 0, 4096, HUGE), "steps[0].slot"),
    ],
)
def test_a_step_out_of_range_names_its_field(target: Target, step: wire.CopyStep, field: str) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        refused(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[step])), field)
        raw.send(wire.Run(1, store=True, steps=[step]))
        said = refused(raw.answer(wire.Refused), field)
        assert (said.id, said.word, said.seq) == (0, wire.run_word(-1, 1), 1)
        # The number was not used up by what did not take place.
        raw.send(wire.Run(1, store=False, steps=[STEP]))
        notice = raw.page(1)
        assert notice.wait(wire.NOTICE_STARTED + wire.run_word(-1, 1), 1, 5.0)


@pytest.mark.parametrize("program", [1, -1, 64, HUGE, 2**63])
def test_starting_what_was_never_opened(target: Target, program: int) -> None:
    with target.raw() as raw:
        raw.hello(target.gpu)
        raw.send(wire.Start(program, 1))
        refused(raw.answer(wire.Refused), "program")


def test_no_steps_too_many_and_a_number_in_use(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        for steps in ([], [wire.CopyStep(0, 0, 1, 0)] * 1025):
            refused(raw.ask(wire.OpenProgram(1, 0, store=False, steps=steps)), "steps")
        assert isinstance(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[STEP] * 1024)), wire.Done)
        for number in (0, -1, 64, HUGE):
            refused(raw.ask(wire.OpenProgram(1, number, store=False, steps=[STEP])), "program")


def test_more_than_two_runs_repeats_and_runs_out_of_order(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        shared, notice = raw.page(0), raw.page(1)
        assert isinstance(raw.ask(wire.OpenProgram(1, 0, store=False, steps=[STEP])), wire.Done)
        shared.store(wire.SLOT_FLAG, wire.FULL)  # so that fetches wait
        for seq in (5, 5, 4, 1, 0, -7, 6):
            raw.send(wire.Start(0, seq))
        raw.send(wire.Start(0, 7))
        raw.send(wire.Run(1, store=False, steps=[STEP]))
        for word, seq in ((wire.run_word(0, 7), 7), (wire.run_word(-1, 1), 1)):
            said = refused(raw.answer(wire.Refused))
            assert (said.kind, said.word, said.seq) == (wire.Kinds.BUSY, word, seq)
        assert notice.load(wire.NOTICE_STARTED + wire.run_word(0, 5)) == 5
        assert notice.load(wire.NOTICE_STARTED + wire.run_word(0, 6)) == 6
        assert refused(raw.ask(wire.CloseProgram(2, 0))).kind == wire.Kinds.IN_USE
        for seq in (5, 6):
            shared.store(wire.SLOT_FLAG, wire.EMPTY)
            assert notice.wait(wire.run_word(0, seq), 0, 5.0)
        assert shared.load(wire.SLOT_FLAG) == wire.FULL
        assert isinstance(raw.ask(wire.CloseProgram(2, 0)), wire.Done)
