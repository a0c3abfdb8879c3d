"""Views into an outbox: the calls that reached a database, faults on the way, and handlers that wait for a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

from outboxio import EventEnvelope, Outbox
from outboxio.statistics.figures import Counters
from tests.kit.app import Journal, MoneyDeposited
from tests.kit.inside import database_of, dispatcher_of, run_of


async def deposits(outbox: Outbox, number: int) -> None:
    """Commit this many deposits in one action, whose parameters stay small because every row repeats them."""
    async with outbox.transaction("Deposits") as tx:
        for amount in range(number):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), model_id=amount, model_type="Wallet")


Trouble = Callable[..., Awaitable[Any]]
"""Called in place of a repository's method, with that method and its arguments."""


class Watched:
    """A repository of a real database: every call reaches it, unless ``trouble`` intervenes."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.trouble: dict[str, Trouble] = {}

    def count(self, *names: str) -> int:
        """The number of calls of these methods."""
        return sum(name in names for name, _ in self.calls)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if not callable(method):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args))
            trouble = self.trouble.get(name)
            return await (method(*args, **options) if trouble is None else trouble(partial(method, **options), *args))

        return call


def watch(outbox: Outbox, repository: str, shard: str = "default") -> Watched:
    """Record the calls of ``events``, ``notifications`` or ``subscriptions`` of an outbox's database."""
    database = database_of(outbox, shard)
    watched = Watched(getattr(database, repository))
    setattr(database, repository, watched)
    return watched


def disable_handoff(outbox: Outbox, shard: str = "default") -> None:
    """Disable the handoff for the rest of this shard run: the dispatcher must find every row."""
    dispatcher = dispatcher_of(outbox, shard)
    dispatcher.handoff = lambda: None
    if dispatcher._core.in_flight.handoff is not None:  # of a round in progress
        dispatcher._core.in_flight.handoff.hand = lambda rows: None


def breaks(times: int, *, before: bool = True, error: Exception | None = None) -> Trouble:
    """Break the connection this many times: before the database receives the statement, or before it answers.

    ``error`` is raised in place of the error of a connection.
    """
    left = times

    async def trouble(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0 and before:
            raise error or ConnectionResetError("the connection broke")
        result = await method(*args)
        if left >= 0:
            raise ConnectionResetError("the connection broke before the answer came")
        return result

    return trouble


def counters(outbox: Outbox, shard: str = "default") -> Counters:
    """The counters of the current shard run."""
    return run_of(outbox, shard).counters


class Gate(Journal):
    """A handler that waits until :meth:`open` is called, and counts its concurrent runs."""

    def __init__(self) -> None:
        super().__init__()
        self._open = asyncio.Event()
        self.inside = 0
        self.most = 0

    def open(self) -> None:
        self._open.set()

    async def __call__(self, envelope: EventEnvelope[Any]) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await super().__call__(envelope)
            await self._open.wait()
        finally:
            self.inside -= 1
