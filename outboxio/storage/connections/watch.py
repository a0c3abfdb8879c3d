"""Finds dead connections, which will never answer (decision 18).

A connection can be dead without being closed: the server's machine has lost its power, a balancer has forgotten the
connection, or a proxy takes bytes without passing them on. A task that waits for an answer would wait for ever, and a
time limit cannot distinguish a dead connection from a slow statement. The server can: over a new connection the watch
asks for the state of the server sessions. A connection is dead if the server has no such session any more, or if the
session was idle during the whole wait.

A single timer reads all connections in use twice a second, and reads only the state that the drivers keep anyway: a
statement has no timer, no task and no round trip of its own. The server is asked only after an answer is missing for
PATIENCE seconds, once for all waiting connections.
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

LOOK = 0.5  # seconds between two readings of the connections in use
PATIENCE = 5.0  # seconds without an answer after which the server is asked
SUSPECT_PATIENCE = 2.0  # the same, soon after a connection to this server has turned out to be dead
SUSPICION_LASTS = 30.0  # seconds
ASKED_AGAIN = 10.0  # seconds between two questions about a session that is at work
IDLE_FOR = 2.0  # seconds after which a session is idle, and not only between two statements
MOST_SILENCES = 2  # questions in a row without an answer, after which the server or the network counts as silent


class ServerSession(Struct, frozen=True):
    """The server session of a connection: the server, and the number of the session."""

    server: Hashable
    number: int


class Sessions(Struct, frozen=True):
    """The state of server sessions: the seconds for which each session is idle, ``None`` for a session at work."""

    server: Hashable
    idle: Mapping[int, float | None]


class _Wait(Struct):
    """The answer that a connection waits for, the start of the wait, and the time of the last question about it."""

    token: Hashable
    since: float
    asked: float = float("-inf")


class Watch:
    """Watches the connections to one URL."""

    def __init__(
        self,
        name: str,
        *,
        used: Callable[[], Iterable[Any]],
        waits_for: Callable[[Any], Hashable | None],
        ask: Callable[[Sequence[int]], Awaitable[Sessions | None]],
        answered_within: float,
        end: Callable[[Any, str], None],
    ) -> None:
        """The parameters:

        - ``used``: the connections in use.
        - ``waits_for``: the answer that a connection waits for, or ``None``. Answers to different statements are not
          equal, and an answer is not equal to itself after bytes were sent or received.
        - ``ask``: the state of server sessions, asked over a new connection; ``None`` if the server cannot know.
        - ``answered_within``: the seconds after which an unanswered question counts as silence.
        - ``end``: called with a dead connection and the reason.
        """
        self._name = name
        self._used = used
        self._waits_for = waits_for
        self._ask_server = ask
        self._answered_within = answered_within
        self._end = end
        self._sessions: WeakKeyDictionary[Any, ServerSession] = WeakKeyDictionary()
        self._begin_anew(None)

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._waits: dict[Any, _Wait] = {}
        self._silences = 0
        self._suspect_until = float("-inf")

    def knows(self, connection: Any, session: ServerSession | None) -> None:
        """Remember the server session of a new connection; ``None``: a proxy that shares sessions."""
        if session is not None:
            self._sessions[connection] = session

    def begin(self) -> None:
        """Start the timer, because a connection is in use from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._begin_anew(loop)
        if self._timer is None:
            self._timer = loop.call_later(LOOK, self._look)

    def suspect(self) -> None:
        """Ask the server sooner for SUSPICION_LASTS seconds, because a connection has turned out to be dead."""
        if self._loop is not None:
            self._suspect_until = self._loop.time() + SUSPICION_LASTS

    async def close(self) -> None:
        """End the timer and a question that is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        asking, self._asking = self._asking, None
        if asking is not None and self._loop is asyncio.get_running_loop():
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking

    def _look(self) -> None:
        assert self._loop is not None
        used = list(self._used())
        self._timer = self._loop.call_later(LOOK, self._look) if used else None
        self._waits = {connection: wait for connection in used if (wait := self._wait_of(connection)) is not None}
        if self._asking is None and (waits := self._in_vain()):
            self._asking = self._loop.create_task(self._ask(waits), name="outboxio watch")

    def _wait_of(self, connection: Any) -> _Wait | None:
        assert self._loop is not None
        token = self._waits_for(connection)
        if token is None:
            return None
        before = self._waits.get(connection)
        return before if before is not None and before.token == token else _Wait(token, self._loop.time())

    def _in_vain(self) -> dict[Any, _Wait]:
        """All waiting connections, if the server must be asked about at least one of them now; otherwise empty."""
        assert self._loop is not None
        now = self._loop.time()
        patience = PATIENCE if now > self._suspect_until else SUSPECT_PATIENCE
        if any(now - wait.since >= patience and now - wait.asked >= ASKED_AGAIN for wait in self._waits.values()):
            return {c: wait for c, wait in self._waits.items() if now - wait.since >= SUSPECT_PATIENCE}
        return {}

    async def _ask(self, waits: Mapping[Any, _Wait]) -> None:
        try:
            await self._judge(waits)
        except Exception as error:
            # A refusal is an answer, too, and the waiting connections are refused themselves.
            logger.debug("%s could not be asked about its sessions: %r", self._name, error)
        finally:
            self._asking = None

    async def _judge(self, waits: Mapping[Any, _Wait]) -> None:
        assert self._loop is not None
        for wait in waits.values():
            wait.asked = self._loop.time()
        of = {connection: session for connection in self._used() if (session := self._sessions.get(connection))}
        try:
            async with asyncio.timeout(self._answered_within):
                sessions = await self._ask_server([session.number for session in of.values()])
        except TimeoutError:
            self._not_answered(waits)
            return
        self._silences = 0
        if sessions is not None:
            known = {connection: s.number for connection, s in of.items() if s.server == sessions.server}
            idle = {c: wait for c, wait in waits.items() if (sessions.idle.get(known.get(c, -1)) or 0.0) >= IDLE_FOR}
            self._end_waiting(idle, "the server has had nothing to do for it in the meantime")
            self._end_gone([connection for connection, number in known.items() if number not in sessions.idle])

    def _not_answered(self, waits: Mapping[Any, _Wait]) -> None:
        """Ask again at once. After MOST_SILENCES silences in a row end all waiting connections."""
        self._silences += 1
        for wait in waits.values():
            wait.asked = float("-inf")
        if self._silences >= MOST_SILENCES:
            self._end_waiting(waits, f"neither were {self._silences} new connections answered in time")

    def _end_waiting(self, waits: Mapping[Any, _Wait], why: str) -> None:
        """End the connections that still wait for the same answer."""
        assert self._loop is not None
        used = set(self._used())
        for connection, wait in waits.items():
            if connection in used and self._waits_for(connection) == wait.token:
                self._end(connection, f"no answer for {self._loop.time() - wait.since:.0f} s, and {why}")

    def _end_gone(self, connections: Iterable[Any]) -> None:
        """End the connections that are still in use."""
        used = set(self._used())
        for connection in connections:
            if connection in used:
                self._end(connection, "the server has no such session any more")
