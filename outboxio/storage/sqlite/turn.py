"""Turns at the writing connection of a SQLite database."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from outboxio.errors import PoolExhausted, TransactionError
from outboxio.support import machine
from outboxio.support.aio import Waiters
from outboxio.support.log import log_of

logger = log_of(__name__)


class Turn:
    """Gives the tasks of an event loop turns at the writer, in the order of asking."""

    def __init__(self, shard: str, where: str, timeout: float) -> None:
        """``timeout``: seconds that a task waits for a turn."""
        self._shard = shard
        self._where = where
        self._timeout = timeout
        self._owner: asyncio.Task[Any] | None = None
        self.is_taken = False
        """True if a task has the turn."""
        self._taken_at = 0.0
        self._waiters: Waiters[None] = Waiters(timeout, refusal=self._exhausted, served_late=self._tell_wait)

    @property
    def is_mine(self) -> bool:
        """True if the current task has the turn."""
        return self._owner is not None and self._owner is asyncio.current_task()

    async def take(self) -> None:
        """Wait for the turn of the current task; :class:`PoolExhausted` after ``timeout`` seconds."""
        if self.is_mine:
            raise TransactionError(
                f"this task has a transaction open on shard {self._shard!r}, and SQLite has one writer: it would wait "
                "for itself for ever. Let the transaction end first"
            )
        if self.is_taken:
            await self._waiters.wait(self._serve_next)
        self.is_taken = True
        self._owner = asyncio.current_task()
        self._taken_at = machine.monotonic()

    def pass_on(self) -> None:
        """Give the turn to the next task."""
        self._owner = None
        self._serve_next()

    def stop_timer(self) -> None:
        """Leave no timer behind: the database is closed."""
        self._waiters.stop_timer()

    def _serve_next(self, served: None = None) -> None:
        self.is_taken = self._waiters.serve(None)

    def _exhausted(self) -> PoolExhausted:
        held = machine.monotonic() - self._taken_at
        return PoolExhausted(self._shard, self._where, size=1, in_use=1, held=held, timeout=self._timeout)

    def _tell_wait(self, seconds: float) -> None:
        logger.warning(
            "an action waited %.1f s for the one writer of shard %s: other actions keep it for long",
            seconds, self._shard, shard=self._shard, seconds=seconds,
        )  # fmt: skip

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pass_on()
