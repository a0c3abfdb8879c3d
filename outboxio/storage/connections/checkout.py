"""Checks a connection out for one transaction, and always releases it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from outboxio.storage.connections.pool import GiveBack
from outboxio.support.aio import run_to_completion

S = TypeVar("S")

CheckOut = Callable[[], Awaitable[tuple[Any, GiveBack]]]
"""Acquires a connection from a pool."""
Explain = Callable[[S, BaseException], Awaitable[Exception | None]]
"""Returns the error to raise instead of the error that ended the transaction, or ``None``."""


class CheckedOut(Generic[S]):
    """A connection of a pool, or a unit of a user-supplied engine, in the session of the dialect."""

    def __init__(
        self, check_out: CheckOut, make: Callable[[Any], S], explain: Explain[S], restore: GiveBack | None = None
    ) -> None:
        """``restore`` releases a connection after an action that may have changed its session settings."""
        self._check_out = check_out
        self._make = make
        self._explain = explain
        self._restore = restore
        self._session: Any = None

    async def __aenter__(self) -> S:
        self._connection, self._give_back = await self._check_out()
        try:
            session = self._session = self._make(self._connection)
        except BaseException:
            if (giving := self._give_back(self._connection)) is not None:
                await run_to_completion(giving)
            raise
        return session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained: Exception | None = None
        give_back = self._give_back
        if self._restore is not None and self._session.may_have_changed_session:
            give_back = self._restore
        try:
            if error is not None:
                explained = await self._explained(error)
        finally:
            if (giving := give_back(self._connection)) is not None:
                await run_to_completion(giving)
        if explained is not None:
            raise explained from error

    async def _explained(self, error: BaseException) -> Exception | None:
        """Return the error as explained by the SQLAlchemy session, or else by the driver."""
        unit = self._session.unit
        explained = unit.explained(error) if unit is not None and isinstance(error, Exception) else None
        return explained or await self._explain(self._session, error)
