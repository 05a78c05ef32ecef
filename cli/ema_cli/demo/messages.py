"""What the demo and its workers say to each other: one JSON object a line, over the worker's standard streams."""

import msgspec

from ema_cli.serving.outcome import Outcome
from ema_cli.serving.presets import GpuSpec, Model
from ema_cli.serving.trace import Request


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker serves. Amounts in bytes as shown, times in seconds as shown."""

    index: int
    """Of its GPU."""
    socket: str
    """The agent's."""
    model: Model
    gpu: GpuSpec
    share: int
    """For keys and values."""
    link: float
    """Rate at which memory can be borrowed; 0 for never."""
    limit: int
    patience: float
    requests: list[Request]
    duration: float
    size_scale: int
    speed: float
    seed: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """The run begins at this real moment, of `time.monotonic`."""

    at: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has its weights in memory and waits for `Go`."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker at one moment. Amounts in bytes as shown."""

    moment: float
    """Seconds of the run."""
    local: int
    """Keys and values in the own share."""
    borrowed: int
    """Keys and values elsewhere."""
    granted: int
    """Held elsewhere, used or not."""
    running: int
    parked: int
    queue: int
    served: int
    tokens: int
    link_bytes: int
    """Fetched and stored so far, real bytes."""
    wrong: int


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of a worker's part."""

    outcome: Outcome
    fetched: int
    """Real bytes."""
    stored: int
    """Real bytes."""
    exposed: float
    """Real seconds that fetches were waited for, as the client measured them."""
    wrong: int
    checked: int
    """Real bytes that were compared."""
    late: float
    """Real seconds by which this machine was too slow for the speed."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on."""

    why: str


FromWorker = Ready | Progress | Result | Failed
