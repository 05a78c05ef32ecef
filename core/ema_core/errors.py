"""What is said about bad input: which field, what was there, what would be right."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One wrong value."""

    field: str
    """Where it is: `spec.lending.headroom`, `trace.csv line 7, ContextTokens`."""
    value: object
    """What was there."""
    expected: str
    """What would be right, as the rest of a sentence that starts with "expected"."""

    def __str__(self) -> str:
        try:
            shown = repr(self.value)
        except ValueError:  # Python refuses to write out integers of thousands of digits, which YAML's 0x can give
            shown = f"{type(self.value).__name__} that is too long to be shown"
        if len(shown) > 80:  # a whole document pasted into one field must not flood the terminal
            shown = shown[:77] + "..."
        return f"{self.field}: got {shown}; expected {self.expected}"


class InvalidInput(ValueError):
    """Input was refused and nothing was changed. Holds every wrong field that was found, at least one."""

    def __init__(self, errors: Iterable[FieldError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))

    @classmethod
    def of(cls, field: str, value: object, expected: str) -> "InvalidInput":
        """With a single wrong field."""
        return cls([FieldError(field, value, expected)])
