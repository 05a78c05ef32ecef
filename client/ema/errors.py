"""What the library raises. Each comes before wrong data can be used."""


class EmaError(Exception):
    """Base of all errors of this library."""


class AgentLost(EmaError):
    """The node agent is gone, and what was borrowed from it. Regions must be made again."""


class Reclaimed(EmaError):
    """Droppable data was taken back: `chunks` hold nothing true. Renew the region and compute them again."""

    def __init__(self, region: int, chunks: list[int], chunk_bytes: int) -> None:
        where = ", ".join(str(c) for c in chunks[:8]) + ("…" if len(chunks) > 8 else "")
        super().__init__(
            f"region {region}: chunks {where} of {chunk_bytes} bytes were reclaimed; renew and recompute them"
        )
        self.region, self.chunks, self.chunk_bytes = region, chunks, chunk_bytes


class DataLost(EmaError):
    """A GPU failed with the only true copy of these chunks. They must not be used."""

    def __init__(self, region: int, chunks: list[int], cause: str) -> None:
        super().__init__(f"region {region}: chunks {chunks} are lost: {cause}")
        self.region, self.chunks, self.cause = region, chunks, cause


class PoolFull(EmaError):
    """The pool had not enough to lend in time. `position` is the place in the queue when time ran out (0 was next)."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class LimitReached(EmaError):
    """The request is above what this lease may ever hold."""


class OutOfMemory(EmaError):
    """The GPU has not that much memory for its own share, lent or not."""


class BadInput(EmaError, ValueError):
    """An argument cannot be: `field`, `value`, and what was `expected`."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} is {value}; expected {expected}")
        self.field, self.value, self.expected = field, value, expected


class InUse(EmaError):
    """Something else has to end first."""


class TimedOut(EmaError, TimeoutError):
    """A wait ran out of time. Nothing is lost: wait again."""
