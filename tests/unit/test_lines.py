"""What lines remember of rows. The database that they ask is a dictionary here; on real ones, see test_ordered.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from outboxio.event import Event, EventTypes
from outboxio.handler import HandlerRegistry, make_handler
from outboxio.lines import Lines
from outboxio.notification import Notification
from outboxio.outcome import Lease
from outboxio.queues import HandlerQueue, Run, Source
from outboxio.settings import Settings
from outboxio.storage.protocols import Head

NOON = datetime(2026, 1, 1, 12)


class Opened(Event):
    pass


async def handle(envelope: Any) -> None:
    pass


class Rows:
    """Heads by key, and what was blocked."""

    def __init__(self, heads: dict[str, Head]) -> None:
        self.heads = heads
        self.blocked: list[UUID] = []

    async def find_heads(self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool) -> Any:
        return {key: self.heads[key] for key in keys if key in self.heads}

    async def heads_after(self, *args: Any, **options: Any) -> Any:
        return {}

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        self.blocked += ids
        return len(ids)


def queue() -> HandlerQueue:
    handler = make_handler(
        handle, name="ledger", event_types=(Opened,), aliases=(), topic=None, where="here", ordered=True
    )
    HandlerRegistry(EventTypes()).add(handler)
    return HandlerQueue(handler, Settings(), 1, None)


def rows_of(owner: HandlerQueue, key: str, number: int) -> list[Run]:
    def row(sequence: int) -> Run:
        context: Any = SimpleNamespace(ordering_key=key, created_date=NOON)
        notification = Notification(
            UUID(int=sequence), "ledger", "Opened", "{}", "PENDING", 0, NOON, NOON, sequence, None
        )
        run = Run(notification, owner, Lease("lease", "ledger", 1))
        run.notification = _With(notification, context)  # type: ignore[assignment]
        return run

    return [row(sequence) for sequence in range(number)]


class _With:
    """A notification with a context that needs no decoding."""

    def __init__(self, notification: Notification, context: Any) -> None:
        self._notification = notification
        self.context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notification, name)


def lines_on(database: Any, released: list[Run]) -> Lines:
    return Lines(
        "app",
        database,
        lambda: NOON,
        release=released.append,
        skip=lambda outcome: None,
        unblocked=lambda: None,
    )


async def test_what_waits_is_given_back_if_the_lock_is_gone_when_its_head_ends() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released)
    head, *waiting = rows_of(owner, "a", 4)

    assert await lines.admit(owner, [*waiting, head]) == [head]
    assert (released, database.blocked) == ([], [])

    lines.left(head)
    await lines.advance([], now=0.0)  # no source: another process has the handler now
    assert released == waiting


async def test_what_waits_moves_up_when_its_head_ends() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released)
    first, second, third = rows_of(owner, "a", 3)
    source = Source("ledger", owner, first.lease)
    await lines.admit(owner, [third, first, second])

    started: list[Run] = []
    for ended, following in ((first, second), (second, third)):
        database.heads["a"] = Head(following.notification.id, "PENDING")
        lines.left(ended)
        started += await lines.advance([source], now=0.0)

    assert started == [second, third]
    assert (released, database.blocked) == ([], [])


async def test_behind_a_head_that_waits_for_its_retry_the_others_are_blocked() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released)
    first, *others = rows_of(owner, "a", 3)
    await lines.admit(owner, [first, *others])

    database.heads["a"] = Head(first.notification.id, "FAILED")
    lines.left(first)
    assert await lines.advance([Source("ledger", owner, first.lease)], now=0.0) == []

    assert database.blocked == [run.notification.id for run in others]
    assert released == others
