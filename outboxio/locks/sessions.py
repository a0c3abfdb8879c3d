"""The lines of this process: the tasks that want the same key wait in the order of arrival."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import SHARE_OF_HEARTBEAT, Database, KeySession
from outboxio.support.aio import over, to_the_end
from outboxio.support.log import log_of


class Line:
    """The tasks that want a key. The task with the turn holds the key, or waits for a different process."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.tasks = 0


class Lines:
    """A line for each key that a task wants."""

    def __init__(self) -> None:
        self._lines: dict[LockName, Line] = {}

    async def enter(self, name: LockName, until: float | None) -> None:
        """Wait for the turn. Raises :class:`TimeoutError` at the moment ``until`` of the event loop's clock."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line()
        line.tasks += 1
        try:
            if until is None or line.tasks == 1:  # without a wait, and without a timer
                await line.turn.acquire()
            else:
                async with asyncio.timeout_at(until):
                    await line.turn.acquire()
        except BaseException:
            self._forget(name, line)
            raise

    def leave(self, name: LockName) -> None:
        """Give the turn to the next task."""
        line = self._lines[name]
        line.turn.release()
        self._forget(name, line)

    def _forget(self, name: LockName, line: Line) -> None:
        line.tasks -= 1
        if not line.tasks:
            del self._lines[name]


# --- a lock session, and the keyed locks that use the session -------------------------------------


logger = log_of(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two tries for a lock; each pause doubles
LONGEST_WAIT = 10  # seconds of a wait on the server, which may not notice that the waiting task has gone


class User(Protocol):
    """A keyed lock that waits or holds on a session."""

    @property
    def is_held(self) -> bool: ...

    def lose(self) -> None:
        """The session has ended, and the lock with it."""


class LockSession:
    """A session, from its opening to its end. The session is never opened a second time."""

    def __init__(self, database: Database, owner: str, heartbeat: float) -> None:
        self.users: dict[User, None] = {}
        self.used_at = asyncio.get_running_loop().time()
        """The last moment at which the session had users."""
        self._database = database
        self._heartbeat = heartbeat
        self._session: KeySession = database.key_session(owner, heartbeat)
        self._proven_at = self.used_at
        self._is_proving = False

    @property
    def is_open(self) -> bool:
        return self._session.is_open

    async def open(self) -> None:
        """Open the session if it is new. Raises :class:`DatabaseUnavailable`."""
        if not self._session.is_open:
            await self._ask(self._session.open)

    async def take(self, name: LockName, until: float | None) -> bool:
        """Take a lock, and wait for the lock until a moment of the event loop's clock; False if the time is over."""
        time, pause = asyncio.get_running_loop().time, FIRST_PAUSE
        while not await self._try(name, LONGEST_WAIT if until is None else until - time()):
            left = LONGEST_PAUSE if until is None else until - time()
            if left <= 0:
                return False
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    async def _try(self, name: LockName, left: float) -> bool:
        seconds = min(int(left), LONGEST_WAIT) if self._session.waits and not self._is_shared else 0
        is_taken = await self._ask_safely(lambda: self._session.take(name, seconds))
        if is_taken and self._silence > self._heartbeat:  # the answer may be old news, if this process stood still
            await self._ask(self._session.prove)
        return is_taken

    async def leave(self, name: LockName) -> bool:
        """Release a lock, or leave its line; False if the session has ended before."""
        try:
            await self._ask_safely(lambda: self._session.leave(name))
        except Exception as error:  # which has dropped the session
            logger.debug("the lock session ended before a keyed lock was released: %s", error)
            return False
        return True

    async def raise_term(self, lease: str) -> int:
        return await to_the_end(self._ask(lambda: self._session.raise_term(lease)))

    def look(self) -> None:
        """Drop a session that was silent for so long that the server may have ended the session. Tell the holders."""
        held = [user for user in self.users if user.is_held]
        if held and (not self.is_open or self._silence >= self._session.longest_silence):
            self.drop()
            for user in held:
                user.lose()

    @property
    def is_due(self) -> bool:
        """True if the session holds locks, and has to be proven."""
        is_old = self._silence >= SHARE_OF_HEARTBEAT * self._heartbeat
        return is_old and not self._is_proving and any(user.is_held for user in self.users)

    async def prove(self) -> None:
        """Ask the server for a proof that the session lives. :meth:`look` ends a session without an answer."""
        self._is_proving = True
        try:
            await self._ask(self._session.prove)
        except Exception as error:  # which has dropped the session
            logger.debug("a session with keyed locks has ended: %s", error)
            self.look()
        finally:
            self._is_proving = False

    def drop(self) -> None:
        self._session.drop()

    async def close(self) -> None:
        await self._session.close()

    @property
    def _silence(self) -> float:
        """The seconds since the session was proven last."""
        return asyncio.get_running_loop().time() - self._proven_at

    @property
    def _is_shared(self) -> bool:
        return len(self.users) > 1

    def _ask_safely(self, call: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Make a call for one user. A cancelled call drops the session, so with more users the call is made to its end.

        A task for each call would cost a tenth of the speed.
        """
        asking = self._ask(call)
        return to_the_end(asking) if self._is_shared else asking

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        asked = asyncio.get_running_loop().time()
        try:
            answer = await call()
        except Exception as error:
            if self._database.is_unreachable(error) and not isinstance(error, DatabaseUnavailable):
                why = str(error) or type(error).__name__
                raise DatabaseUnavailable(self._database.name, "its lock session", why) from error
            raise
        self._proven_at = max(self._proven_at, asked)
        return answer


# --- the lock sessions of a shard -----------------------------------------------------------------
#
# The lock sessions of a shard: at most as many as the setting ``lock_sessions`` says, opened when needed.


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
