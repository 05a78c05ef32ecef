"""Hostile requests for memory: out of range, beyond the limit, two at a time."""

import pytest

from ema_core import wire
from wire.conftest import Target
from wire.hostile import HUGE, STEP, refused


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (wire.GrowRegion(1, -1, 4096, droppable=False, timeout=1.0), "region"),
        (wire.GrowRegion(1, 1024, 4096, droppable=False, timeout=1.0), "region"),
        (wire.GrowRegion(1, 1, 0, droppable=False, timeout=1.0), "size"),
        (wire.GrowRegion(1, 1, -1, droppable=False, timeout=1.0), "size"),
        (wire.GrowRegion(1, 1, 4096, droppable=False, timeout=float("nan")), "timeout"),
        (wire.GrowRegion(1, 1, 4096, droppable=False, timeout=-1.0), "timeout"),
        (wire.GrowRegion(1, 0, 4096, droppable=True, timeout=1.0), "droppable"),
        (wire.RenewRegion(1, 0, float("nan")), "timeout"),
        (wire.RenewRegion(1, 5, 1.0), "region"),
        (wire.ShrinkRegion(1, 0, -1), "size"),
        (wire.ShrinkRegion(1, 0, 1 << 40), "size"),
        (wire.ShrinkRegion(1, 5, 0), "region"),
        (wire.AskDropped(1, 5), "region"),
        (wire.GrowShare(1, -1, 1.0), "size"),
        (wire.GrowShare(1, 1 << 50, 1.0), "size"),
        (wire.GrowShare(1, 0, float("nan")), "timeout"),
        (wire.Hello(1, "0", "again"), "message"),
        (wire.ShareIs(-1), "size"),
        (wire.Report(float("nan"), 0.0, 0), "report"),
        (wire.Report(0.0, float("inf"), 0), "report"),
        (wire.Report(0.0, 0.0, -1), "report"),
    ],
)
def test_requests_out_of_range_name_their_field(target: Target, message: wire.ClientMessage, field: str) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.region(welcome)
        refused(raw.ask(message), field)


@pytest.mark.parametrize("size", [1 << 40, 2**63, HUGE])
def test_more_than_the_limit_is_refused_at_once(target: Target, size: int) -> None:
    with target.raw() as raw:
        raw.hello(target.gpu)
        said = refused(raw.ask(wire.GrowRegion(1, 0, size, droppable=False, timeout=float("inf"))))
        assert said.kind == wire.Kinds.LIMIT


def test_a_region_is_changed_by_one_request_at_a_time(target: Target) -> None:
    """Two cuts, renewals or a growth in the midst of one would give chunks back twice."""
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome, chunks=4)
        shared = raw.page(0)
        raw.send(
            wire.Run(1, store=True, steps=[wire.CopyStep(0, 3 * welcome.chunk, 4096, 0)])
        )  # waits: a cut waits too
        raw.send(wire.ShrinkRegion(11, 0, 0))
        for request in (
            wire.ShrinkRegion(12, 0, 0),
            wire.RenewRegion(13, 0, 1.0),
            wire.GrowRegion(14, 0, 8 * welcome.chunk, droppable=False, timeout=1.0),
        ):
            assert refused(raw.ask(request)).kind == wire.Kinds.BUSY
        shared.store(wire.SLOT_FLAG, wire.FULL)
        assert raw.answer(wire.Done).id == 11
        refused(raw.ask(wire.ShrinkRegion(15, 0, 0)), "region")


def test_a_program_opened_while_its_region_waits_to_be_cut_keeps_it(target: Target) -> None:
    """Else its next start would copy from memory that is gone, which costs the agent its driver session."""
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome, chunks=2)
        shared, notice = raw.page(0), raw.page(1)
        raw.send(wire.Run(1, store=True, steps=[STEP]))
        raw.send(wire.ShrinkRegion(11, 0, 0))
        raw.send(wire.OpenProgram(12, 0, store=False, steps=[wire.CopyStep(0, welcome.chunk, 4096, 1)]))
        assert raw.answer(wire.Done).id == 12
        shared.store(wire.SLOT_FLAG, wire.FULL)
        said = refused(raw.answer(wire.Refused))
        assert (said.id, said.kind) == (11, wire.Kinds.IN_USE)
        raw.send(wire.Start(0, 1))
        word = wire.run_word(0, 1)
        assert notice.wait(wire.NOTICE_STARTED + word, 1, 5.0)
        assert notice.wait(word, 0, 5.0)


def test_a_growth_given_up_waits_for_no_run(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        raw.region(welcome)
        raw.send(wire.Run(1, store=True, steps=[STEP]))  # never ends
        most = (welcome.limit // welcome.chunk - 2) * welcome.chunk  # the neighbour has some of it
        said = refused(raw.ask(wire.GrowRegion(1, 1, most, droppable=False, timeout=0.05)))
        assert said.kind == wire.Kinds.FULL
        assert said.position >= 0
