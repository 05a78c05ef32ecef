"""The device process's event loop: descriptors, timed events, and work that threads hand back."""

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from ema_driver.sim import linux

now = time.monotonic_ns
WORKERS = 2
"""Threads that copy."""
Callback = Callable[[], None]


class Loop:
    """One thread runs `run`; only `hand_back` may be called from others."""

    def __init__(self) -> None:
        self.ready: deque[Callback] = deque()
        """What can run at once: streams, mostly."""
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callback] = {}
        self._timer = linux.timer()
        self._armed = 0
        self._events: list[tuple[int, int, Callback]] = []
        self._order = itertools.count()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handed: deque[Callback] = deque()
        self._work: SimpleQueue[Callback | None] = SimpleQueue()
        self._running = True
        self.watch(self._timer, self._timer_rang)
        self.watch(self._bell, self._take_back)
        self._workers = [threading.Thread(target=self._labour, name=f"copies-{i}") for i in range(WORKERS)]
        for worker in self._workers:
            worker.start()

    def watch(self, fd: int, callback: Callback) -> None:
        """Call back whenever `fd` is readable or its other end is gone."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Stop watching; call before closing the descriptor."""
        del self._callbacks[fd]
        self._epoll.unregister(fd)

    def call_at(self, when: int, callback: Callback) -> None:
        """Call back at `when` (monotonic nanoseconds)."""
        heapq.heappush(self._events, (when, next(self._order), callback))

    def labour(self, work: Callback) -> None:
        """Run `work` in a worker thread."""
        self._work.put(work)

    def hand_back(self, callback: Callback) -> None:
        """From a worker thread: have the loop call back."""
        self._handed.append(callback)
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Let `run` return."""
        self._running = False

    def run(self) -> None:
        """Until `stop`."""
        try:
            while self._running:
                self._turn()
        finally:
            for _ in self._workers:
                self._work.put(None)
            for worker in self._workers:
                worker.join()

    def _turn(self) -> None:
        for _ in range(len(self.ready)):
            self.ready.popleft()()
        events = self._events
        if events:
            moment = now()
            while events and events[0][0] <= moment:
                heapq.heappop(events)[2]()
            if events and events[0][0] != self._armed:
                self._armed = events[0][0]
                linux.set_timer(self._timer, self._armed)
        callbacks = self._callbacks
        for fd, _ in self._epoll.poll(0 if self.ready or not self._running else -1):
            callback = callbacks.get(fd)
            if callback is not None:  # forgotten by an earlier callback of this turn
                callback()

    def _timer_rang(self) -> None:
        with suppress(BlockingIOError):  # set anew since it rang
            os.read(self._timer, 8)
            self._armed = 0

    def _take_back(self) -> None:
        os.eventfd_read(self._bell)
        while self._handed:
            self._handed.popleft()()

    def _labour(self) -> None:
        while (work := self._work.get()) is not None:
            work()
