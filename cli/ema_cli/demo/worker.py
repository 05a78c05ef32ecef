"""One process for one GPU: it serves its requests, and keeps their bytes where the memory is.

Reads a `Job` and then `Go` from standard input; writes `Ready`, `Progress` now and then, and a `Result` or why it
failed. When standard input ends, whoever started it is gone, and so is the worker.
"""

import faulthandler
import os
import sys
import threading

import msgspec

import ema
from ema_cli.demo.messages import Failed, FromWorker, Go, Job, Ready
from ema_cli.demo.scale import Clock
from ema_cli.demo.serve import Serving

_encoder = msgspec.json.Encoder()


def main() -> int:
    """Serve one job."""
    faulthandler.enable()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    job = msgspec.json.decode(source.readline(), type=Job)

    def tell(message: FromWorker) -> None:
        sink.write(_encoder.encode(message) + b"\n")
        sink.flush()

    try:
        with ema.connect(job.socket, gpu=job.index, name=f"gpu-{job.index}") as pool:
            serving = Serving(job, pool, tell)
            tell(Ready())
            go = msgspec.json.decode(source.readline(), type=Go)
            threading.Thread(target=_end_with, args=(source.fileno(),), daemon=True).start()
            result = serving.run(Clock(go.at, job.speed))
        tell(result)
    except ema.EmaError as error:
        tell(Failed(str(error)))
        return 1
    except (BrokenPipeError, msgspec.DecodeError):
        return 1  # whoever started this process is gone
    return 0


def _end_with(source: int) -> None:
    # Not through the buffered stream: its lock would be held at the interpreter's end.
    os.read(source, 1)
    os._exit(1)  # the agent gives back what this process held


if __name__ == "__main__":
    sys.exit(main())
