"""Lock sessions, and the queues of tasks in this process that wait for the same key."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import SHARE_OF_HEARTBEAT, Database, KeySession
from outboxio.support.aio import run_to_completion, wait_done
from outboxio.support.log import log_of


class LockQueue:
    """The tasks that need a key. The first one holds the key, or waits for another process."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.tasks = 0


class LockQueues:
    """A first-in, first-out queue for each key that tasks of this process wait for."""

    def __init__(self) -> None:
        self._queues: dict[LockName, LockQueue] = {}

    async def enter(self, name: LockName, until: float | None) -> None:
        """Wait until it is this task's turn. Raises :class:`TimeoutError` at ``until`` (event loop time)."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = LockQueue()
        queue.tasks += 1
        try:
            if until is None or queue.tasks == 1:  # without a wait, and without a timer
                await queue.turn.acquire()
            else:
                async with asyncio.timeout_at(until):
                    await queue.turn.acquire()
        except BaseException:
            self._forget(name, queue)
            raise

    def leave(self, name: LockName) -> None:
        """Pass the turn to the next task."""
        queue = self._queues[name]
        queue.turn.release()
        self._forget(name, queue)

    def _forget(self, name: LockName, queue: LockQueue) -> None:
        queue.tasks -= 1
        if not queue.tasks:
            del self._queues[name]


# --- a lock session -------------------------------------------------------------------------------


logger = log_of(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two attempts to acquire a lock; the pause doubles each time
LONGEST_WAIT = 10  # seconds to wait on the server, which may not detect that the waiting task has ended


class User(Protocol):
    """A keyed lock that uses a session."""

    @property
    def is_held(self) -> bool: ...

    def lose(self) -> None:
        """Called when the lock is lost because its session has ended."""


class LockSession:
    """A lock session, which is opened only once."""

    def __init__(self, database: Database, owner: str, heartbeat: float) -> None:
        self.users: dict[User, None] = {}
        self.used_at = asyncio.get_running_loop().time()
        """When the session was last used."""
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
            await self._call(self._session.open)

    async def take(self, name: LockName, until: float | None) -> bool:
        """Acquire a lock, waiting until the given event loop time. Return False on timeout."""
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
        is_taken = await self._call_safely(lambda: self._session.take(name, seconds))
        if (
            is_taken and self._unproven_for > self._heartbeat
        ):  # the result may be outdated if this process was suspended
            await self._call(self._session.prove)
        return is_taken

    async def leave(self, name: LockName) -> bool:
        """Release a lock, or leave its queue. Return False if the session has already ended."""
        try:
            await self._call_safely(lambda: self._session.leave(name))
        except Exception as error:  # the session is dropped
            logger.debug("the lock session ended before a keyed lock was released: %s", error)
            return False
        return True

    async def raise_term(self, lease: str) -> int:
        return await run_to_completion(self._call(lambda: self._session.raise_term(lease)))

    def look(self) -> None:
        """Drop a session that the server may have ended after a long silence, and notify the lock holders."""
        held = [user for user in self.users if user.is_held]
        if held and (not self.is_open or self._unproven_for >= self._session.longest_silence):
            self.drop()
            for user in held:
                user.lose()

    @property
    def is_due(self) -> bool:
        """True if the session holds locks and its existence must be checked again."""
        is_old = self._unproven_for >= SHARE_OF_HEARTBEAT * self._heartbeat
        return is_old and not self._is_proving and any(user.is_held for user in self.users)

    async def prove(self) -> None:
        """Check that the session still exists on the server. :meth:`look` drops a session that does not respond."""
        self._is_proving = True
        try:
            await self._call(self._session.prove)
        except Exception as error:  # the session is dropped
            logger.debug("a session that held keyed locks has ended: %s", error)
            self.look()
        finally:
            self._is_proving = False

    def drop(self) -> None:
        self._session.drop()

    async def close(self) -> None:
        await self._session.close()

    @property
    def _unproven_for(self) -> float:
        """The seconds since the session was last known to exist."""
        return asyncio.get_running_loop().time() - self._proven_at

    @property
    def _is_shared(self) -> bool:
        return len(self.users) > 1

    def _call_safely(self, call: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Make a call for one user. Cancelling a call drops the session, so with several users it is completed.

        Creating a task for every call would make it 10 % slower.
        """
        calling = self._call(call)
        return run_to_completion(calling) if self._is_shared else calling

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        sent_at = asyncio.get_running_loop().time()
        try:
            result = await call()
        except Exception as error:
            if self._database.is_unreachable(error) and not isinstance(error, DatabaseUnavailable):
                why = str(error) or type(error).__name__
                raise DatabaseUnavailable(self._database.name, "its lock session", why) from error
            raise
        self._proven_at = max(self._proven_at, sent_at)
        return result


# --- the lock sessions of a shard -----------------------------------------------------------------


LOOK = 0.1  # seconds between two checks whether a session has ended


class Process(Protocol):
    """The names that identify this process as a lock holder."""

    @property
    def namespace(self) -> str: ...

    @property
    def owner(self) -> str:
        """The name of this process in the table ``leases``. A forked child gets a new name."""
        ...


class LockSessions:
    """The lock sessions of a shard, opened on demand. Tasks wait for a free session, first come, first served."""

    def __init__(self, database: Database, process: Process, limit: int, heartbeat: float) -> None:
        """``limit``: the setting ``lock_sessions``. ``heartbeat``: the seconds between two checks of a session."""
        self.most = database.max_key_sessions(limit)
        self.era = 0
        """Incremented when the sessions are closed, to reject the tasks that are waiting at that time."""
        self._database = database
        self._process = process
        self._heartbeat = heartbeat
        self.reset()

    def reset(self) -> None:
        """Discard the sessions of the previous event loop."""
        self._members: list[LockSession] = []
        self._free = asyncio.Semaphore(self.most)
        self._keeper: asyncio.Task[None] | None = None
        self._is_checked = False

    async def enter(self, user: User, beside: LockSession | None, until: float | None, era: int) -> LockSession:
        """Return a session for ``user``, possibly not open yet. ``beside``: a session to share if all are in use.

        Raises :class:`TimeoutError` if no session was free by ``until``. The caller must call :meth:`leave` afterwards.
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
        """Open a session before ``until``. Raises :class:`TimeoutError` and :class:`DatabaseUnavailable`."""
        if self._keeper is None or self._keeper.done():
            # An empty context, so that the task does not belong to the transaction or handler that surrounds this call.
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
        """Stop using the session for ``user``."""
        session.users.pop(user, None)
        if not session.users:
            session.used_at = asyncio.get_running_loop().time()
            self._free.release()

    async def close(self) -> None:
        """Close all sessions. Locks that are still held are lost, and waiting tasks get an error."""
        self.era += 1
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await wait_done(keeper)
        for session in list(self._members):
            if session.users:
                session.drop()
                session.look()
            await session.close()
        self._members.clear()

    async def _keep(self) -> None:
        """Detect ended sessions, check sessions with locks, and close idle sessions after a heartbeat."""
        try:
            async with asyncio.TaskGroup() as proofs:
                while self._members:
                    await asyncio.sleep(min(LOOK, self._heartbeat / 4))
                    for session in list(self._members):
                        session.look()
                        if session.is_due:
                            proofs.create_task(session.prove())
                        elif not session.users and self._is_disposable(session):
                            self._members.remove(session)
                            await session.close()
        except Exception:
            logger.exception("the keyed lock keepalive failed; all keyed locks of this process are lost")
            for session in self._members:
                session.drop()
                session.look()

    def _closed(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(self._database.name, "its lock sessions", "the outbox was closed")

    def _is_disposable(self, session: LockSession) -> bool:
        return not session.is_open or asyncio.get_running_loop().time() - session.used_at >= self._heartbeat
