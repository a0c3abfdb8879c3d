"""Checks a connection out of a given engine for one transaction, and always gives the connection back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

from outboxio.storage.engines.given_engine import GivenEngine
from outboxio.storage.engines.unit import Unit
from outboxio.support.aio import to_the_end

Session = TypeVar("Session")


class CheckedOutUnit(Generic[Session]):
    """The connection of a given engine for one transaction, in the dialect's session."""

    def __init__(
        self,
        engine: GivenEngine,
        make: Callable[[Unit], Session],
        explain: Callable[[Session, Exception], Awaitable[Exception | None]],
    ) -> None:
        """``explain`` returns the error to raise in place of the error that ended the transaction, or ``None``."""
        self._engine = engine
        self._make = make
        self._explain = explain

    async def __aenter__(self) -> Session:
        self._unit = await self._engine.check_out()
        try:
            self._session = self._make(self._unit)
        except BaseException:
            await to_the_end(self._unit.close())
            raise
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained: Exception | None = None
        try:
            if isinstance(error, Exception):
                explained = self._unit.explained(error) or await self._explain(self._session, error)
        finally:
            await to_the_end(self._unit.close())
        if explained is not None:
            raise explained from error
