"""The memory of ordering keys. The database is a dictionary here; for real databases see test_ordered.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.event import Event, EventTypes
from outboxio.model.lock_name import Slot
from outboxio.model.notification import Notification
from outboxio.model.outcome import Lease
from outboxio.runs.cursor import HandlerCursor, Partitions
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.key_queues import KeyQueues, KeyRows
from outboxio.runs.ordering import AdmissionGate
from outboxio.runs.run import Run
from outboxio.settings import Settings
from outboxio.storage.protocols import Head, PartitionCount
from outboxio.support.clock import as_micros

NOON = datetime(2026, 1, 1, 12)


class Opened(Event):
    pass


async def handle(envelope: Any) -> None:
    pass


class Rows:
    """Heads by key, and the blocked rows."""

    def __init__(self, heads: dict[str, Head]) -> None:
        self.heads = heads
        self.blocked: list[UUID] = []
        self.failures: list[Exception | None] = []
        self.refuses_to_block = False
        self.when_blocked: Callable[[], object] = lambda: None
        self.unblocked: list[str] = []
        self.swept: list[str] = []
        self.release_attempts = 0

    async def find_heads(self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool) -> Any:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return {key: self.heads[key] for key in keys if key in self.heads}

    async def heads_after(self, namespace: str, name: str, *args: Any, **options: Any) -> Any:
        self.swept.append(name)
        return {}

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        if self.refuses_to_block:
            raise OSError("refused")
        self.blocked += ids
        self.when_blocked()
        return len(ids)

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        return set(ids)

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        self.release_attempts += 1
        return 0

    async def unblock(self, namespace: str, names: Sequence[str], keys: Sequence[str], *args: Any) -> int:
        self.unblocked += keys
        return len(keys)


def queue(strict: frozenset[str] = frozenset()) -> HandlerQueue:
    handler = make_handler(
        handle, name="ledger", event_types=(Opened,), aliases=(), topic=None, where="here", ordered=True
    )
    HandlerRegistry(EventTypes()).add(handler)
    return HandlerQueue(HandlerSpec.of(handler, Settings(), 1, None, strict))


def rows_of(owner: HandlerQueue, key: str, number: int, first: int = 0) -> list[Run]:
    def row(sequence: int) -> Run:
        context: Any = SimpleNamespace(ordering_key=key, created_date=NOON, event_id=UUID(int=sequence), action_name="")
        notification = Notification(
            UUID(int=sequence),
            "ledger",
            "Opened",
            "{}",
            "PENDING",
            0,
            as_micros(NOON),
            as_micros(NOON),
            sequence,
            0,
            None,
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
        self.event_id = context.event_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notification, name)


def lines_on(
    database: Any, released: list[Run], started: list[Run] | None = None, *, partitions: int = 1
) -> AdmissionGate:
    began = list[Run]() if started is None else started

    def start(runs: Sequence[Run]) -> int:
        began.extend(runs)
        return len(runs)

    spread = Partitions(lambda: NOON)
    spread.apply({"ledger": PartitionCount("ledger", partitions, partitions, NOON)})
    return AdmissionGate(
        KeyQueues(),
        KeyRows("app", database, lambda: NOON, lambda: None),
        spread,
        start=start,
        release=released.append,
        skip=lambda outcome: None,
    )


async def test_waiting_rows_are_released_if_the_lock_is_lost() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released)
    head, *waiting = rows_of(owner, "a", 4)

    assert await lines.admit(owner, [*waiting, head]) == [head]
    assert (released, database.blocked) == ([], [])

    lines._keys.left(head)
    await lines.advance([], now=0.0)  # no source: another process has the handler now
    assert released == waiting


async def test_waiting_rows_move_up_when_their_head_ends() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    started = list[Run]()
    lines = lines_on(database, released, started)
    first, second, third = rows_of(owner, "a", 3)
    source = HandlerCursor(Slot("ledger"), owner, first.lease)
    await lines.admit(owner, [third, first, second])

    for ended, following in ((first, second), (second, third)):
        database.heads["a"] = Head(following.notification.id, "PENDING")
        lines._keys.left(ended)
        assert await lines.advance([source], now=0.0) == 1

    assert started == [second, third]
    assert (released, database.blocked) == ([], [])


async def test_rows_behind_a_retrying_head_are_blocked() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released)
    first, *others = rows_of(owner, "a", 3)
    await lines.admit(owner, [first, *others])

    database.heads["a"] = Head(first.notification.id, "FAILED")
    lines._keys.left(first)
    assert await lines.advance([HandlerCursor(Slot("ledger"), owner, first.lease)], now=0.0) == 0

    assert database.blocked == [run.notification.id for run in others]
    assert released == others


async def test_a_failure_in_one_key_queue_loses_no_rows_of_others() -> None:
    first, second = queue(), queue()
    released, started = list[Run](), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released, started)
    of_first, of_second = rows_of(first, "a", 2), rows_of(second, "a", 2)
    sources = [HandlerCursor(Slot("ledger"), owner, Lease("lease", "ledger", 1)) for owner in (first, second)]
    await lines.admit(first, of_first)
    await lines.admit(second, of_second)
    database.heads["a"] = Head(UUID(int=1), "PENDING")
    lines._keys.left(of_first[0])
    lines._keys.left(of_second[0])
    database.failures = [None, OSError("gone")]

    with pytest.raises(OSError, match="gone"):
        await lines.advance(sources, now=0.0)
    assert started == [of_first[1]]

    await lines.advance(sources, now=0.0)
    assert (started, released) == ([of_first[1], of_second[1]], [])


async def test_rows_that_could_not_be_blocked_stop_no_other_key() -> None:
    owner, released, started = queue(), list[Run](), list[Run]()
    database = Rows({key: Head(UUID(int=number), "PENDING") for key, number in (("a", 0), ("b", 10))})
    lines = lines_on(database, released, started)
    of_a, of_b = rows_of(owner, "a", 2), rows_of(owner, "b", 2, first=10)
    source = HandlerCursor(Slot("ledger"), owner, of_a[0].lease)
    await lines.admit(owner, [*of_a, *of_b])
    database.heads = {"a": Head(UUID(int=1), "PENDING"), "b": Head(UUID(int=10), "FAILED")}
    lines._keys.left(of_a[0])
    lines._keys.left(of_b[0])
    database.refuses_to_block = True

    with pytest.raises(OSError, match="refused"):
        await lines.advance([source], now=0.0)

    # Rows that did not start were released, so they are found again.
    assert (started, {run.notification.id for run in released}) == ([], {UUID(int=1), UUID(int=11)})


# --- across partitions -------------------------------------------------------------------------


def elsewhere(database: Rows, waiting: Run) -> None:
    """The head of the key is a row of another process, which ends the head while this process blocks the next row."""
    database.heads["a"] = Head(UUID(int=99), "PENDING")
    database.when_blocked = lambda: database.heads.update(a=Head(waiting.notification.id, "BLOCKED"))


async def test_a_row_blocked_after_its_predecessor_ended_elsewhere_is_unblocked() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({})
    lines = lines_on(database, released, partitions=2)
    [run] = rows_of(owner, "a", 1)
    elsewhere(database, run)
    assert await lines.admit(owner, [run]) == []
    assert (database.blocked, database.unblocked, lines.unblocked) == ([run.notification.id], ["a"], 1)


async def test_rows_in_memory_whose_head_ended_elsewhere_are_unblocked() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, released, partitions=2)
    first, second = rows_of(owner, "a", 2)
    await lines.admit(owner, [first, second])
    elsewhere(database, second)
    lines._keys.left(first)
    await lines.advance([HandlerCursor(Slot("ledger", 1), owner, first.lease)], now=0.0)
    assert (database.blocked, database.unblocked) == ([second.notification.id], ["a"])


async def test_a_handler_with_a_single_partition_does_not_check_again() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({})
    lines = lines_on(database, released)
    [run] = rows_of(owner, "a", 1)
    elsewhere(database, run)
    await lines.admit(owner, [run])
    assert database.unblocked == []


async def test_a_failed_second_check_is_repeated_in_the_next_round() -> None:
    owner, released = queue(), list[Run]()
    database = Rows({})
    lines = lines_on(database, released, partitions=2)
    [run] = rows_of(owner, "a", 1)
    elsewhere(database, run)
    database.failures = [None, OSError("gone")]
    with pytest.raises(OSError, match="gone"):
        await lines.admit(owner, [run])
    await lines.advance([HandlerCursor(Slot("ledger", 1), owner, run.lease)], now=0.0)
    assert database.unblocked == ["a"]


async def test_only_the_holder_of_partition_0_searches_for_stranded_keys() -> None:
    owner = queue()
    database = Rows({})
    lines = lines_on(database, [], partitions=2)
    lease = Lease("lease", "ledger", 1)
    await lines.advance([HandlerCursor(Slot("ledger", 1), owner, lease)], now=0.0)
    assert database.swept == []
    lines.stranded.sweep_soon()
    await lines.advance([HandlerCursor(Slot("ledger", number), owner, lease) for number in (0, 1)], now=0.0)
    assert database.swept == ["ledger"]


async def test_only_waiting_rows_of_a_lost_slot_are_released() -> None:
    owner = queue()
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, [], partitions=2)
    head, second, third = rows_of(owner, "a", 3)
    third.notification._notification.partition_number = 1  # type: ignore[attr-defined]
    await lines.admit(owner, [head, second, third])
    taken = lines._keys.take_waiting(owner, Slot("ledger", 1).holds)
    assert (taken, third.key) == ([third], None)
    assert lines._keys.queues[id(owner), "a"].waiting == [second]


@pytest.mark.parametrize(("partitions", "attempts"), [(1, 0), (2, 1)])
async def test_a_row_blocked_after_the_previous_handler_checked_is_unblocked(partitions: int, attempts: int) -> None:
    owner = queue(strict=frozenset({"Opened"}))
    database = Rows({"a": Head(UUID(int=0), "PENDING")})
    lines = lines_on(database, [], partitions=partitions)
    [run] = rows_of(owner, "a", 1)
    assert await lines.admit(owner, [run]) == []
    assert (database.blocked, database.release_attempts) == ([UUID(int=0)], attempts)
