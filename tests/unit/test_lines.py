"""What lines remember of rows. The database that they ask is a dictionary here; on real ones, see test_ordered.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from outboxio.clock import as_micros
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
        self.failures: list[Exception | None] = []
        self.refuses_to_block = False

    async def find_heads(self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool) -> Any:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return {key: self.heads[key] for key in keys if key in self.heads}

    async def heads_after(self, *args: Any, **options: Any) -> Any:
        return {}

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        if self.refuses_to_block:
            raise OSError("refused")
        self.blocked += ids
        return len(ids)


def queue() -> HandlerQueue:
    handler = make_handler(
        handle, name="ledger", event_types=(Opened,), aliases=(), topic=None, where="here", ordered=True
    )
    HandlerRegistry(EventTypes()).add(handler)
    return HandlerQueue(handler, Settings(), 1, None)


def rows_of(owner: HandlerQueue, key: str, number: int, first: int = 0) -> list[Run]:
    def row(sequence: int) -> Run:
        context: Any = SimpleNamespace(ordering_key=key, created_date=NOON)
        notification = Notification(
            UUID(int=sequence), "ledger", "Opened", "{}", "PENDING", 0, as_micros(NOON), as_micros(NOON), sequence, None
        )
        run = Run(notification, owner, Lease("lease", "ledger", 1))
        run.notification = _With(notification, context)  # type: ignore[assignment]
        return run

    return [row(sequence) for sequence in range(first, first + number)]


class _With:
    """A notification with a context that needs no decoding."""

    def __init__(self, notification: Notification, context: Any) -> None:
        self._notification = notification
        self.context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notification, name)


def lines_on(database: Any, released: list[Run], started: list[Run] | None = None) -> Lines:
    return Lines(
        "app",
        database,
        lambda: NOON,
        start=(list[Run]() if started is None else started).append,
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
    started = list[Run]()
    lines = lines_on(database, released, started)
    first, second, third = rows_of(owner, "a", 3)
    source = Source("ledger", owner, first.lease)
    await lines.admit(owner, [third, first, second])

    for ended, following in ((first, second), (second, third)):
        database.heads["a"] = Head(following.notification.id, "PENDING")
        lines.left(ended)
        assert await lines.advance([source], now=0.0) == 1

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
    assert await lines.advance([Source("ledger", owner, first.lease)], now=0.0) == 0

    assert database.blocked == [run.notification.id for run in others]
    assert released == others


async def test_a_failure_of_one_handlers_lines_loses_nothing_of_anothers() -> None:
    first, second = queue(), queue()
    released, started = list[Run](), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released, started)
    of_first, of_second = rows_of(first, "a", 2), rows_of(second, "a", 2)
    sources = [Source("ledger", owner, Lease("lease", "ledger", 1)) for owner in (first, second)]
    await lines.admit(first, of_first)
    await lines.admit(second, of_second)
    database.heads["a"] = Head(UUID(int=1), "PENDING")
    lines.left(of_first[0])
    lines.left(of_second[0])
    database.failures = [None, OSError("gone")]

    with pytest.raises(OSError, match="gone"):
        await lines.advance(sources, now=0.0)
    assert started == [of_first[1]]

    await lines.advance(sources, now=0.0)
    assert (started, released) == ([of_first[1], of_second[1]], [])


async def test_rows_that_could_not_be_blocked_keep_no_other_key_from_moving_up() -> None:
    owner, released, started = queue(), list[Run](), list[Run]()
    database = Rows({key: Head(UUID(int=number), "PENDING") for key, number in (("a", 0), ("b", 10))})
    lines = lines_on(database, released, started)
    of_a, of_b = rows_of(owner, "a", 2), rows_of(owner, "b", 2, first=10)
    source = Source("ledger", owner, of_a[0].lease)
    await lines.admit(owner, [*of_a, *of_b])
    database.heads = {"a": Head(UUID(int=1), "PENDING"), "b": Head(UUID(int=10), "FAILED")}
    lines.left(of_a[0])
    lines.left(of_b[0])
    database.refuses_to_block = True

    with pytest.raises(OSError, match="refused"):
        await lines.advance([source], now=0.0)

    # Whatever did not start was given back, so that it is found again.
    assert (started, {run.notification.id for run in released}) == ([], {UUID(int=1), UUID(int=11)})
