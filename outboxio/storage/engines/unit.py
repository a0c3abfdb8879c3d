"""A unit: one connection of a user-supplied engine with one transaction, and the SQLAlchemy session on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import await_only, greenlet_spawn

from outboxio.errors import StaleRecord, TransactionEnded
from outboxio.model.action import cause_chain
from outboxio.storage.protocols import CommitLost
from outboxio.support.log import log_of

logger = log_of(__name__)

REFUSED = ("commit", "rollback", "close", "reset", "invalidate", "prepare")
"""The methods of the synchronous session, below the asynchronous one, that would end the transaction."""


class StaleObject(StaleRecord, StaleDataError):
    """A concurrent transaction has changed the row of a mapped object. The cause is SQLAlchemy's error."""


class Unit:
    """A transaction on a connection of a user-supplied engine. SQLAlchemy begins and ends the transaction.

    The session is created on demand, so that a transaction without a session needs only the connection.
    """

    def __init__(self, connection: AsyncConnection, maker: async_sessionmaker[AsyncSession]) -> None:
        self._connection = connection
        self._maker = maker
        self._session: AsyncSession | None = None
        self.is_broken = False
        """True if the connection must not be returned to the pool."""
        pooled: Any = connection.sync_connection.connection  # type: ignore[union-attr]  # None only before the connection is open
        self.driver: Any = pooled.driver_connection
        """The driver's connection."""

    async def begin(self, send: Callable[[Any], Awaitable[object]] | None = None) -> None:
        """Begin a transaction. SQLAlchemy sends BEGIN with the first statement; ``send`` sends it immediately.

        ``send`` is called with SQLAlchemy's connection, in a SQLAlchemy greenlet.
        """

        def begin(connection: Any) -> None:
            connection.begin()
            if send is not None:
                await_only(send(connection))

        await self._connection.run_sync(begin)

    def session(self, action_name: str) -> AsyncSession:
        """Return the session of the transaction. The methods in ``REFUSED`` raise an error that names the action."""
        if self._session is None:
            # control_fully: the session's commit is the commit of the connection, so its events fire at the right time.
            options: dict[str, Any] = {"bind": self._connection, "join_transaction_mode": "control_fully"}
            if binds := self._maker.kw.get("binds"):
                options["binds"] = {each: self._in_transaction(bind) for each, bind in binds.items()}
            self._session = self._maker(**options)
            own = self._session.sync_session
            vars(own).update(_refusals(action_name))
            own.begin()  # from now on SQLAlchemy itself rejects session.begin(), whose end would commit
        return self._session

    async def flush(self) -> None:
        """Flush the session. Raises :class:`StaleObject` if a version has changed."""
        if self._session is not None:
            await self._session.flush()

    async def release_savepoints(self) -> None:
        """Release the open savepoints of the session."""
        if (own := self._own) is not None and own.in_nested_transaction():
            await greenlet_spawn(self._release, own)

    async def commit(self) -> None:
        """Commit. Raises :class:`CommitLost` if the connection was lost during the commit."""
        try:
            await greenlet_spawn(self._commit)
        except Exception as error:
            if any(isinstance(e, OSError) or getattr(e, "connection_invalidated", False) for e in cause_chain(error)):
                raise CommitLost from error
            raise

    async def rollback(self) -> None:
        await greenlet_spawn(self._roll_back)

    async def close(self) -> None:
        """Return the connection to the engine's pool without a transaction; a broken connection is invalidated."""
        try:
            await greenlet_spawn(self._close)
        except Exception as error:
            # The action has already ended, so an error of the pool must not change its result.
            logger.warning("connection could not be reset; the engine's pool will open a new one: %s", error)

    @staticmethod
    def explained(error: Exception) -> Exception | None:
        """Return a :class:`StaleObject` for a version conflict that SQLAlchemy has found; otherwise ``None``."""
        for cause in cause_chain(error):
            if isinstance(cause, StaleRecord):
                return None
            if isinstance(cause, StaleDataError):
                return StaleObject("a mapped object")
        return None

    def _in_transaction(self, bind: AsyncEngine | AsyncConnection) -> AsyncEngine | AsyncConnection:
        """Return the connection of the transaction if ``bind`` is its engine; otherwise ``bind``."""
        is_own = isinstance(bind, AsyncEngine) and bind.sync_engine.pool is self._connection.engine.sync_engine.pool
        return self._connection if is_own else bind

    @property
    def _own(self) -> Session | None:
        return None if self._session is None else self._session.sync_session

    @staticmethod
    def _release(own: Session) -> None:
        while (savepoint := own.get_nested_transaction()) is not None:
            savepoint.commit()

    def _commit(self) -> None:
        if (own := self._own) is not None:
            type(own).commit(own)
        connection: Any = self._connection.sync_connection
        if connection.in_transaction():  # the session has not joined the transaction
            connection.commit()

    def _roll_back(self) -> None:
        if (own := self._own) is not None:
            type(own).rollback(own)
        connection: Any = self._connection.sync_connection
        if connection.in_transaction():
            connection.rollback()

    def _close(self) -> None:
        connection: Any = self._connection.sync_connection
        try:
            if self.is_broken:
                connection.invalidate()
            if (own := self._own) is not None:
                type(own).close(own)
        finally:
            connection.close()


@lru_cache(maxsize=1000)
def _refusals(action_name: str) -> Mapping[str, Callable[..., NoReturn]]:
    """Return replacements of the methods in ``REFUSED`` for the sessions of an action."""

    def refusal(name: str) -> Callable[..., NoReturn]:
        def refuse(*args: object, **options: object) -> NoReturn:
            raise TransactionEnded(action_name, f"session.{name}()")

        return refuse

    return {name: refusal(name) for name in REFUSED}
