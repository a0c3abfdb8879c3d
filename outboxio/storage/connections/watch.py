"""Finds dead connections, which will never respond (decision 18).

A connection can be dead without being closed: the server's machine has lost power, a load balancer has dropped the
connection, or a proxy accepts bytes without forwarding them. A task that waits for a response would wait forever, and a
timeout cannot distinguish a dead connection from a slow statement. The server can: over a new connection, the watch
reads the state of the server sessions. A connection is dead if its server session no longer exists, or was idle during
the whole wait.

A single timer checks all connections in use twice a second, using only state that the drivers keep anyway: statements
need no extra timer, task or round trip. The server is queried only if a response is missing for PATIENCE seconds, once
for all waiting connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct

from outboxio.support.log import log_of

logger = log_of(__name__)

CHECK_INTERVAL = 0.5  # seconds between two checks of the connections in use
PATIENCE = 5.0  # seconds without a response after which the server is queried
SUSPECT_PATIENCE = 2.0  # the same, shortly after a connection to this server was found dead
SUSPICION_LASTS = 30.0  # seconds
RECHECK_INTERVAL = 10.0  # seconds between two queries about an active session
IDLE_FOR = 2.0  # seconds after which a session counts as idle, not just between two statements
MAX_TIMEOUTS = 2  # consecutive queries without a response, after which the server counts as unreachable


class ServerSession(Struct, frozen=True):
    """The server session of a connection: the server, and the id of the session."""

    server: Hashable
    number: int


class Sessions(Struct, frozen=True):
    """The state of server sessions: the seconds for which each has been idle; ``None`` for an active session."""

    server: Hashable
    idle: Mapping[int, float | None]


class _Wait(Struct):
    """The response that a connection waits for, since when, and the time of the last query about it."""

    token: Hashable
    since: float
    checked: float = float("-inf")


class Watch:
    """Watches the connections to one URL."""

    def __init__(
        self,
        name: str,
        *,
        used: Callable[[], Iterable[Any]],
        waits_for: Callable[[Any], Hashable | None],
        query: Callable[[Sequence[int]], Awaitable[Sessions | None]],
        query_timeout: float,
        end: Callable[[Any, str], None],
    ) -> None:
        """The parameters:

        - ``used``: the connections in use.
        - ``waits_for``: a token for the response that a connection waits for, or ``None``. The token changes with every
          statement, and whenever bytes are sent or received.
        - ``query``: reads the state of server sessions over a new connection; ``None`` if it is not available.
        - ``query_timeout``: the time limit of such a query, in seconds.
        - ``end``: called with a dead connection and the reason.
        """
        self._name = name
        self._used = used
        self._waits_for = waits_for
        self._query_sessions = query
        self._query_timeout = query_timeout
        self._end = end
        self._sessions: WeakKeyDictionary[Any, ServerSession] = WeakKeyDictionary()
        self._reset(None)

    def _reset(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None
        self._waits: dict[Any, _Wait] = {}
        self._timeouts = 0
        self._suspect_until = float("-inf")

    def register(self, connection: Any, session: ServerSession | None) -> None:
        """Remember the server session of a new connection; ``None`` behind a proxy that shares sessions."""
        if session is not None:
            self._sessions[connection] = session

    def begin(self) -> None:
        """Start the timer, because a connection is in use."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._reset(loop)
        if self._timer is None:
            self._timer = loop.call_later(CHECK_INTERVAL, self._look)

    def suspect(self) -> None:
        """Query the server sooner for SUSPICION_LASTS seconds, because a connection was found dead."""
        if self._loop is not None:
            self._suspect_until = self._loop.time() + SUSPICION_LASTS

    async def close(self) -> None:
        """Stop the timer and a running query."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        checking, self._checking = self._checking, None
        if checking is not None and self._loop is asyncio.get_running_loop():
            checking.cancel()
            with suppress(asyncio.CancelledError):
                await checking

    def _look(self) -> None:
        assert self._loop is not None
        used = list(self._used())
        self._timer = self._loop.call_later(CHECK_INTERVAL, self._look) if used else None
        self._waits = {connection: wait for connection in used if (wait := self._wait_of(connection)) is not None}
        if self._checking is None and (waits := self._overdue()):
            self._checking = self._loop.create_task(self._check(waits), name="outboxio watch")

    def _wait_of(self, connection: Any) -> _Wait | None:
        assert self._loop is not None
        token = self._waits_for(connection)
        if token is None:
            return None
        before = self._waits.get(connection)
        return before if before is not None and before.token == token else _Wait(token, self._loop.time())

    def _overdue(self) -> dict[Any, _Wait]:
        """Return all waiting connections, if the server should be queried about one of them now; otherwise none."""
        assert self._loop is not None
        now = self._loop.time()
        patience = PATIENCE if now > self._suspect_until else SUSPECT_PATIENCE
        if any(
            now - wait.since >= patience and now - wait.checked >= RECHECK_INTERVAL for wait in self._waits.values()
        ):
            return {c: wait for c, wait in self._waits.items() if now - wait.since >= SUSPECT_PATIENCE}
        return {}

    async def _check(self, waits: Mapping[Any, _Wait]) -> None:
        try:
            await self._check_sessions(waits)
        except Exception as error:
            # The server has responded, if only with an error, so the waiting connections will get a response too.
            logger.debug("%s: cannot read the server sessions: %r", self._name, error)
        finally:
            self._checking = None

    async def _check_sessions(self, waits: Mapping[Any, _Wait]) -> None:
        assert self._loop is not None
        for wait in waits.values():
            wait.checked = self._loop.time()
        of = {connection: session for connection in self._used() if (session := self._sessions.get(connection))}
        try:
            async with asyncio.timeout(self._query_timeout):
                sessions = await self._query_sessions([session.number for session in of.values()])
        except TimeoutError:
            self._timed_out(waits)
            return
        self._timeouts = 0
        if sessions is not None:
            known = {connection: s.number for connection, s in of.items() if s.server == sessions.server}
            idle = {c: wait for c, wait in waits.items() if (sessions.idle.get(known.get(c, -1)) or 0.0) >= IDLE_FOR}
            self._end_waiting(idle, "its server session is idle")
            self._end_gone([connection for connection, number in known.items() if number not in sessions.idle])

    def _timed_out(self, waits: Mapping[Any, _Wait]) -> None:
        """Query again at once. After MAX_TIMEOUTS timeouts in a row, end all waiting connections."""
        self._timeouts += 1
        for wait in waits.values():
            wait.checked = float("-inf")
        if self._timeouts >= MAX_TIMEOUTS:
            self._end_waiting(waits, f"{self._timeouts} new connections were not answered in time either")

    def _end_waiting(self, waits: Mapping[Any, _Wait], why: str) -> None:
        """End the connections that still wait for the same response."""
        assert self._loop is not None
        used = set(self._used())
        for connection, wait in waits.items():
            if connection in used and self._waits_for(connection) == wait.token:
                self._end(connection, f"no response for {self._loop.time() - wait.since:.0f} s, and {why}")

    def _end_gone(self, connections: Iterable[Any]) -> None:
        """End the connections that are still in use."""
        used = set(self._used())
        for connection in connections:
            if connection in used:
                self._end(connection, "its server session no longer exists")
