"""A lock session, and the keyed locks that use the session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import SHARE_OF_HEARTBEAT, Database, KeySession
from outboxio.support.aio import to_the_end
from outboxio.support.log import log_of

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
