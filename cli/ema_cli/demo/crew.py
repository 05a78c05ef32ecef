"""The workers, one process for each GPU, and what they say."""

import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, Self

import msgspec

from ema_cli.demo.messages import Failed, FromWorker, Go, Job, Progress, Ready, Result
from ema_cli.demo.server import DemoFailed
from ema_cli.demo.stop import undivided

_SILENT: Final = 15.0
"""Real seconds without a word after which a worker counts as hung."""
_END: Final = 5.0
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


class Worker:
    """One process."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.index = job.index
        self.progress: Progress | None = None
        self.result: Result | None = None
        self.ready = False
        self.heard = time.monotonic()
        self._complaint = folder / f"worker-{job.index}.log"
        self._rest = b""
        with self._complaint.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ema_cli.demo.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._send(job)

    @property
    def stream(self) -> IO[bytes]:
        """What it writes."""
        assert self.process.stdout is not None  # noqa: S101 - it was opened as a pipe
        return self.process.stdout

    def go(self, at: float) -> None:
        """Let it begin at a real moment."""
        self._send(Go(at))

    def hear(self) -> None:
        """Read what it has to say. Raises DemoFailed if it failed or ended."""
        data = self.stream.read1(1 << 16)  # type: ignore[attr-defined]
        self.heard = time.monotonic()
        if not data:
            if self.result is None:
                raise DemoFailed(f"the worker of GPU {self.index} ended ({self._why()})")
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = _decoder.decode(line)
            if isinstance(message, Progress):
                self.progress = message
            elif isinstance(message, Ready):
                self.ready = True
            elif isinstance(message, Result):
                self.result = message
            elif isinstance(message, Failed):
                raise DemoFailed(f"the worker of GPU {self.index} failed: {message.why}")

    def abort(self) -> str:
        """End it; where it was."""
        self.process.send_signal(signal.SIGABRT)
        return self._why()

    def close(self) -> None:
        """End it, whatever it does."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        if self.result is None:
            self.process.kill()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, message: Job | Go) -> None:
        assert self.process.stdin is not None  # noqa: S101 - it was opened as a pipe
        try:
            self.process.stdin.write(_encoder.encode(message) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise DemoFailed(f"the worker of GPU {self.index} ended ({self._why()})") from None

    def _why(self) -> str:
        code = self.process.wait(_END)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = self._complaint.read_text("utf-8", errors="replace").strip()[-2000:]
        return f"{how}: {said}" if said else how


class Crew:
    """All workers of a run. Nothing of them is left when it is closed."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self.workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        try:
            for job in jobs:
                with undivided():
                    worker = Worker(job, folder)
                    self.workers.append(worker)
                self._selector.register(worker.stream, selectors.EVENT_READ, worker)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> bool:
        """Whether all have given their result."""
        return all(worker.result is not None for worker in self.workers)

    def until_ready(self, timeout: float) -> None:
        """Wait until all have their weights in memory. Raises DemoFailed."""
        deadline = time.monotonic() + timeout
        while not all(worker.ready for worker in self.workers):
            if (left := deadline - time.monotonic()) <= 0:
                late = [worker.index for worker in self.workers if not worker.ready]
                raise DemoFailed(f"the workers of GPUs {late} were not ready after {timeout:g} s")
            self.hear(left)

    def hear(self, timeout: float) -> None:
        """Take what the workers say; waits up to `timeout` real seconds for it. Raises DemoFailed."""
        for key, _ in self._selector.select(timeout):
            worker: Worker = key.data
            worker.hear()
            if worker.result is not None:
                self._selector.unregister(worker.stream)
        for worker in self.workers:
            if worker.result is None and time.monotonic() - worker.heard > _SILENT:
                raise DemoFailed(f"the worker of GPU {worker.index} hangs ({worker.abort()})")

    def close(self) -> None:
        """End all of them."""
        self._selector.close()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
