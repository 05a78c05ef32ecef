"""One connection for everything that a pool's caches have parked: a GPU has streams for a dozen connections or so."""

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ema.pool import Pool


class Joint:
    """The connection, and how many use it."""

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool.another()
        self.users = 0


_lock = threading.Lock()
_joints: "WeakKeyDictionary[Pool, Joint]" = WeakKeyDictionary()


def join(pool: "Pool") -> Joint:
    """Use the pool's joint connection, made now if there is none that lives. `leave` it once. Raises AgentLost."""
    with _lock:
        joint = _joints.get(pool)
        if joint is None or not joint.pool.alive:
            joint = _joints[pool] = Joint(pool)
        joint.users += 1
        return joint


def leave(pool: "Pool", joint: Joint) -> None:
    """Use it no more; the last one out closes it."""
    with _lock:
        joint.users -= 1
        if joint.users:
            return
        if _joints.get(pool) is joint:
            del _joints[pool]
    joint.pool.close()
