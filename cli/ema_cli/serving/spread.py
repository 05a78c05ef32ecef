"""Which instance a request goes to: tenants take turns, so that some GPUs burst while others idle."""

from collections.abc import Sequence
from random import Random

from ema_cli.serving.trace import Request


def spread(
    requests: Sequence[Request], *, instances: int, active: int, cycles: int, rate: float, seed: int
) -> tuple[list[list[Request]], float]:
    """Requests of each instance, in order of arrival, and the duration in seconds.

    Times are divided by `rate`. The duration is cut into `cycles` times as many turns as there are instances; in turn t
    the instances t, t + 1, ... t + active - 1 (round the end) are active, and each request goes to one of them by lot.
    So every instance is active for `active` turns in a row, `cycles` times, shifted by one turn against its neighbour.
    """
    lot = Random(seed)  # noqa: S311 (a repeatable choice, not a secret)
    turns = instances * cycles
    duration = max(requests[-1].arrival, 1e-9) / rate
    dealt: list[list[Request]] = [[] for _ in range(instances)]
    for request in requests:
        arrival = request.arrival / rate
        turn = min(turns - 1, int(arrival / duration * turns))
        owner = (turn + lot.randrange(active)) % instances
        dealt[owner].append(Request(request.id, arrival, request.prompt, request.generated))
    return dealt, duration
