"""Who becomes a client: from a guest's Hello to an open session, or to what is wrong with it."""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from ema_agent.connection import Connection
from ema_agent.door import NAME, Guest
from ema_agent.lanes import Lanes
from ema_agent.lease import Lease
from ema_agent.node import Node
from ema_agent.pools import Pools
from ema_agent.session import Session
from ema_agent.steward import Steward
from ema_core import wire
from ema_core.errors import InvalidInput
from ema_core.ids import GpuId, LeaseId, PoolName
from ema_core.wire import Kinds
from ema_driver.errors import DriverError, InvalidUse
from ema_driver.protocol import MemoryDriver

SESSIONS: Final = 4096


class Admission:
    """Opens sessions, and knows those that are open."""

    def __init__(self, driver: MemoryDriver, steward: Steward, lanes: Lanes, pools: Pools) -> None:
        self._driver, self._steward, self._lanes, self._pools = driver, steward, lanes, pools
        self.sessions: dict[LeaseId, Session] = {}
        self._numbers = itertools.count(1)

    def introduce(self, guest: Guest, hello: wire.Hello) -> None:
        """Answer a Hello."""
        connection, node = guest.connection, self._steward.node
        if hello.version != wire.VERSION:
            text = (
                f"version {hello.version} of the library does not fit this agent's {wire.VERSION}: use the same release"
            )
            connection.send(wire.Refused(0, Kinds.VERSION, text, "version", str(hello.version), str(wire.VERSION)))
            connection.close(text)
            return
        try:
            gpu = node.find_gpu(hello.gpu)
            pool = self._pools.find(hello.pool, gpu)
            if not NAME.fullmatch(hello.name):
                raise InvalidInput.of("name", hello.name, "1 to 63 letters, digits, '.', '_' or '-'")
            if len(self.sessions) >= SESSIONS:
                raise InvalidInput.of("clients", len(self.sessions), f"fewer than {SESSIONS}")
            session = self._open(connection, hello.name, gpu, pool)
            guest.receive, guest.ended = session.received, session.disconnected
            # Only now: the client may have gone already, and sending would end the connection.
            message, fds, sent = _welcome(session, self._driver, node)
            connection.send(message, fds)
            sent()
        except InvalidInput as refused:
            first = refused.errors[0]
            connection.refuse_and_close(first.field, str(first.value) or "empty", first.expected)
        except (DriverError, OSError) as error:  # OSError: this process has no descriptor left
            connection.send(wire.Refused(0, Kinds.INTERNAL, f"no place for another client: {error}"))
            connection.close("no place for another client")

    def _open(self, connection: Connection, name: str, gpu: GpuId, pool: PoolName) -> Session:
        steward = self._steward
        lease = Lease(LeaseId(f"{name}-{next(self._numbers)}"), pool, gpu, self._pools.chunk(pool), name=name)
        lease.counts_on = steward.node.counts_on(gpu)
        self._pools.set_terms(lease)
        session = Session(self._driver, steward, self._lanes, lease=lease, connection=connection, ended=self._ended)
        steward.ledger.open_lease(lease)
        self.sessions[lease.id] = session
        steward.wake()  # its GPU lends no more until it opts in
        return session

    def _ended(self, session: Session) -> None:
        self.sessions.pop(session.lease.id, None)


def _welcome(session: Session, driver: MemoryDriver, node: Node) -> tuple[wire.Welcome, list[int], Callable[[], None]]:
    """The answer to Hello, the descriptors beside it, and what to call when they were sent."""
    lease = session.lease
    fds = [session.shared.fileno(), session.notice.fileno()]
    sent: Callable[[], None] = _nothing
    try:
        guest = driver.guest(lease.gpu)
    except InvalidUse:
        pass  # Borrowers reach their GPU by themselves.
    else:
        fds.append(guest)
        sent = partial(os.close, guest)
    message = wire.Welcome(
        version=wire.VERSION,
        driver=driver.name,
        lease=lease.id,
        gpu=lease.gpu,
        pool=lease.pool,
        chunk=lease.chunk,
        granularity=driver.granularity(lease.gpu),
        limit=lease.limit,
        guaranteed=lease.guaranteed,
        rate=node.best_rate(lease.gpu),
        guest=len(fds) == 3,
    )
    return message, fds, sent


def _nothing() -> None:
    """Nothing was lent for the answer."""
