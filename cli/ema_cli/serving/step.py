"""What goes into a macro-step and what comes out of it."""

from dataclasses import dataclass

from ema_cli.serving.trace import Request


@dataclass(frozen=True, slots=True)
class Path:
    """Borrowed memory that is reached at one rate."""

    size: int
    """Bytes."""
    rate: float
    """Bytes per second."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What an instance has for keys and values at one moment."""

    local: int
    """Bytes of its own share that it may use now."""
    paths: tuple[Path, ...] = ()
    """Borrowed memory, fastest first."""

    @property
    def borrowed(self) -> int:
        """Bytes, over all paths."""
        return sum(path.size for path in self.paths)


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that an instance could use now."""

    local: int
    """Of its own share; at least what is in use."""
    borrowed: int


@dataclass(slots=True, eq=False)
class Active:
    """A request that has memory."""

    request: Request
    size: int
    """Bytes reserved: all its tokens."""
    order: int
    """Place in order of admission."""
    borrowed: bool
    left: int
    """Tokens still to be generated, as of when it last began to run."""
    since: int = 0
    """The instance's step count when it last began to run."""
    parked: bool = False


@dataclass(frozen=True, slots=True)
class MacroStep:
    """What happens from `start` to `end`. Requests in `admitted`, `resumed`, `parked`, `moved_home` change at the
    start, those in `finished` at the end.
    """  # noqa: D205

    start: float
    end: float
    steps: int
    """Decode steps."""
    admitted: tuple[Active, ...]
    resumed: tuple[Active, ...]
    parked: tuple[Active, ...]
    moved_home: tuple[Active, ...]
    """Fetched from borrowed memory into the share."""
    finished: tuple[Active, ...]
    tokens: int
    """Generated."""
    fetched: int
    """Bytes from borrowed memory, over all decode steps and moves."""
    stored: int
    """Bytes to borrowed memory."""
    exposed: float
    """Seconds that the step waited for a link and nothing else."""


@dataclass(slots=True)
class Group:
    """Sums over running requests of one placement: their keys and values in tokens are `offset + n * step count`."""

    n: int = 0
    offset: int = 0
    size: int = 0

    def add(self, active: Active) -> None:
        """One begins to run."""
        self.n += 1
        self.offset += filled(active) - active.since
        self.size += active.size

    def remove(self, active: Active) -> None:
        """One stops; its fields must be as they were when it began."""
        self.n -= 1
        self.offset -= filled(active) - active.since
        self.size -= active.size

    def tokens(self, tick: float) -> float:
        """Tokens with keys and values at that step count."""
        return self.offset + self.n * tick


def filled(active: Active) -> int:
    """Tokens it had keys and values for when it last began to run."""
    return active.request.prompt + active.request.generated - active.left
