"""Hostile windows: what is no memory, or not as large as said, or in use."""

import os

import pytest

from ema_core import wire
from ema_driver.shared_memory import sealed_memory
from wire.conftest import Target
from wire.hostile import HUGE, refused


def test_descriptors_that_are_no_window(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        size = welcome.granularity
        read, write = os.pipe()
        unsealed = os.memfd_create("unsealed")
        os.ftruncate(unsealed, size)
        wrong = sealed_memory("wrong", size)
        null, regular = os.open(os.devnull, os.O_RDWR), os.open("/etc/hostname", os.O_RDONLY)
        other = target.node.observer.create(target.node.gpus[2], size)
        foreign = target.node.observer.export(other)
        fds = [read, write, unsealed, wrong, null, regular, foreign, raw.fds[0], raw.sock.fileno()]
        for fd in fds:
            refused(raw.ask(wire.OpenWindow(1, 0, 0, 1, size), [fd]), "descriptor")
        for count in (0, 2, 3):
            refused(raw.ask(wire.OpenWindow(1, 0, 0, 1, size), [null] * count), "descriptors")
        for fd in (read, write, unsealed, wrong, null, regular, foreign):
            os.close(fd)
        target.node.observer.release([other])
        raw.window(welcome)


def test_a_window_of_another_size_than_said(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        size = welcome.granularity
        fd = raw.guest().export(raw.guest().create(target.gpu, 4 * size))
        for slots in (1, 2, 8):
            refused(raw.ask(wire.OpenWindow(1, 0, 0, slots, size), [fd]), "descriptor")
        os.close(fd)


@pytest.mark.parametrize(
    ("window", "first", "slots", "size", "field"),
    [
        (-1, 0, 1, 4096, "window"),
        (64, 0, 1, 4096, "window"),
        (HUGE, 0, 1, 4096, "window"),
        (0, 9, 1, 4096, "window"),
        (1, 0, 1, 4096, "first"),
        (1, 1, 4, 4096, "first"),
        (1, -1, 1, 4096, "slots"),
        (1, 1024, 1, 4096, "slots"),
        (1, 2, 0, 4096, "slots"),
        (1, 2, -4, 4096, "slots"),
        (1, 2, HUGE, 4096, "slots"),
        (1, 2, 1, 0, "slot_bytes"),
        (1, 2, 1, -4096, "slot_bytes"),
        (1, 2, 1, 4095, "slot_bytes"),
        (1, 2, 1, 2**63, "slot_bytes"),
        (1, 2, 1000, 2**63, "slot_bytes"),
        (1, 2, 1, HUGE - 4095, "slot_bytes"),
    ],
)
def test_a_window_that_cannot_be(  # noqa: PLR0917
    target: Target, window: int, first: int, slots: int, size: int, field: str
) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        raw.window(welcome)
        fd = raw.guest().export(raw.guest().create(target.gpu, 4096))
        refused(raw.ask(wire.OpenWindow(1, window, first, slots, size), [fd]), field)
        os.close(fd)


def test_closing_windows_in_use_twice_or_never_opened(target: Target) -> None:
    with target.raw() as raw:
        welcome = raw.hello(target.gpu)
        size = raw.window(welcome)
        raw.window(welcome, number=1, first=2)
        raw.region(welcome)
        program = wire.OpenProgram(2, 0, store=False, steps=[wire.CopyStep(0, 0, size, 0)])
        assert isinstance(raw.ask(program), wire.Done)
        raw.send(wire.Run(1, store=True, steps=[wire.CopyStep(0, 0, size, 2)]))  # waits for a slot that is never full
        assert refused(raw.ask(wire.CloseWindow(3, 0))).kind == wire.Kinds.IN_USE
        assert refused(raw.ask(wire.CloseWindow(3, 1))).kind == wire.Kinds.IN_USE
        assert isinstance(raw.ask(wire.CloseProgram(4, 0)), wire.Done)
        refused(raw.ask(wire.CloseProgram(4, 0)), "program")
        assert isinstance(raw.ask(wire.CloseWindow(5, 0)), wire.Done), "a run in another window is no reason"
        for number in (0, 7, -1, HUGE):
            refused(raw.ask(wire.CloseWindow(6, number)), "window")
