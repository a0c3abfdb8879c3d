"""The lock sessions of a shard: at most as many as the setting ``lock_sessions`` says, opened when needed."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Protocol

from outboxio.errors import DatabaseUnavailable
from outboxio.locks.session import LockSession, User
from outboxio.storage.protocols import Database
from outboxio.support.aio import over
from outboxio.support.log import log_of

logger = log_of(__name__)

LOOK = 0.1  # seconds between two looks whether a session has ended


class Process(Protocol):
    """The names under which this process holds locks."""

    @property
    def namespace(self) -> str: ...

    @property
    def owner(self) -> str:
        """The name of this process in the table ``leases``. A forked child has a new name."""
        ...


class LockSessions:
    """A lock that waits or holds has a session for itself. Tasks wait for a free session in the order of arrival."""

    def __init__(self, database: Database, process: Process, wanted: int, heartbeat: float) -> None:
        """``wanted``: the largest number of sessions. ``heartbeat``: the seconds between two proofs."""
        self.most = database.most_key_sessions(wanted)
        self.era = 0
        """Grows when the sessions are closed: a task that waits since then ends."""
        self._database = database
        self._process = process
        self._heartbeat = heartbeat
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the sessions of a former event loop."""
        self._members: list[LockSession] = []
        self._free = asyncio.Semaphore(self.most)
        self._keeper: asyncio.Task[None] | None = None
        self._is_checked = False

    async def enter(self, user: User, beside: LockSession | None, until: float | None, era: int) -> LockSession:
        """A session for ``user``, not open yet. ``beside``: a session to share if all are in use.

        Raises :class:`TimeoutError` if no session was free until then. The caller calls :meth:`leave` in the end.
        """
        if beside is not None and self._free.locked():
            beside.users[user] = None
            return beside
        if until is None or not self._free.locked():  # without a wait, and without a timer
            await self._free.acquire()
        else:
            async with asyncio.timeout_at(until):
                await self._free.acquire()
        if era != self.era:
            self._free.release()
            raise self._closed()
        session = next((member for member in self._members if not member.users and member.is_open), None)
        if session is None:
            session = LockSession(self._database, self._process.owner, self._heartbeat)
            self._members.append(session)
        session.users[user] = None
        return session

    async def open(self, session: LockSession, until: float | None) -> None:
        """Open a session within the time. Raises :class:`TimeoutError` and :class:`DatabaseUnavailable`."""
        if self._keeper is None or self._keeper.done():
            # An empty context: the task must not count as a part of the transaction or the handler around this call.
            keep, empty = self._keep(), contextvars.Context()
            self._keeper = asyncio.get_running_loop().create_task(keep, name="outboxio keyed locks", context=empty)
        if session.is_open:
            return
        async with asyncio.timeout_at(until):
            if not self._is_checked:
                await self._database.refuse_shared_sessions()
                self._is_checked = True
            await session.open()
        if session not in self._members:  # the outbox was closed in the meantime
            await session.close()
            raise self._closed()

    def leave(self, session: LockSession, user: User) -> None:
        """``user`` needs the session no more."""
        session.users.pop(user, None)
        if not session.users:
            session.used_at = asyncio.get_running_loop().time()
            self._free.release()

    async def close(self) -> None:
        """Close all sessions. Locks that are still held are lost, and tasks that wait get an error."""
        self.era += 1
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await over(keeper)
        for session in list(self._members):
            if session.users:
                session.drop()
                session.look()
            await session.close()
        self._members.clear()

    async def _keep(self) -> None:
        """Notice sessions that ended; prove sessions with locks; close idle sessions after a heartbeat."""
        try:
            async with asyncio.TaskGroup() as proofs:
                while self._members:
                    await asyncio.sleep(min(LOOK, self._heartbeat / 4))
                    for session in list(self._members):
                        session.look()
                        if session.is_due:
                            proofs.create_task(session.prove())
                        elif not session.users and self._is_of_no_use(session):
                            self._members.remove(session)
                            await session.close()
        except Exception:
            logger.exception("the keeper of keyed locks has failed; all keyed locks of this process end")
            for session in self._members:
                session.drop()
                session.look()

    def _closed(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(self._database.name, "its lock sessions", "the outbox was closed")

    def _is_of_no_use(self, session: LockSession) -> bool:
        return not session.is_open or asyncio.get_running_loop().time() - session.used_at >= self._heartbeat
