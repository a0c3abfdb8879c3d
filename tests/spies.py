"""Eyes inside: which calls really went to a database, trouble on the way to it, and handlers that wait to be let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

from outboxio import EventEnvelope, Outbox
from outboxio.dispatcher import Counters
from outboxio.shard import ShardWork
from tests.app import Journal, MoneyDeposited


async def deposits(outbox: Outbox, number: int) -> None:
    """Commit so many deposits in one action; its parameters, which every row repeats, stay small."""
    async with outbox.transaction("Deposits") as tx:
        for amount in range(number):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), model_id=amount, model_type="Wallet")


Trouble = Callable[..., Awaitable[Any]]
"""Called in place of a repository's method, with that method and its arguments."""


class Watched:
    """One of the repositories of a real database: every call goes to it, unless ``trouble`` comes in between."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.trouble: dict[str, Trouble] = {}

    def count(self, *names: str) -> int:
        """How often these methods were called."""
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
    """Put eyes on the ``events``, ``notifications`` or ``subscriptions`` of an outbox's database."""
    database = outbox._shards[shard].database
    watched = Watched(getattr(database, repository))
    setattr(database, repository, watched)
    return watched


def nothing_is_handed_over(outbox: Outbox, shard: str = "default") -> None:
    """Let what fan-out makes be found, as what another process makes is, for the rest of this stay."""
    dispatcher: Any = work(outbox, shard).dispatcher
    dispatcher.handover = lambda: None
    if dispatcher._handover is not None:  # of a round that is under way
        dispatcher._handover.hand = lambda rows: None


def breaks(times: int, *, before: bool = True) -> Trouble:
    """The connection breaks so often: before the database gets the statement, or before it can answer."""
    left = times

    async def trouble(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0 and before:
            raise ConnectionResetError("the connection broke")
        result = await method(*args)
        if left >= 0:
            raise ConnectionResetError("the connection broke before the answer came")
        return result

    return trouble


def counters(outbox: Outbox, shard: str = "default") -> Counters:
    """What the present stay in ``running()`` has counted."""
    return work(outbox, shard).counters


def work(outbox: Outbox, shard: str = "default") -> ShardWork:
    """The loops of the present stay in ``running()``."""
    work = outbox._shards[shard].work
    assert work is not None, "the outbox is not running"
    return work


class Gate(Journal):
    """A handler that waits until :meth:`open` is called, and knows how many of its runs go on at once."""

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
