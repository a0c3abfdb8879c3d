"""Queues: what the dispatcher has in memory of a handler."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from outboxio.clock import as_micros, from_micros
from outboxio.event import Event, EventTypes
from outboxio.handler import HandlerRegistry, make_handler
from outboxio.notification import Notification
from outboxio.queues import HandlerQueue
from outboxio.settings import Settings

NOW = datetime(2026, 11, 21, 12, 0, 0, 123457)
WEEK = timedelta(days=7)


class Opened(Event):
    number: int


async def handle(envelope: object) -> None:
    return None


def test_a_row_is_too_old_after_its_window_and_not_at_its_end() -> None:
    handler = make_handler(handle, name="h", event_types=(Opened,), aliases=(), topic=None, where="here")
    HandlerRegistry(EventTypes()).add(handler)
    queue = HandlerQueue(handler, Settings(handling_retention_window=WEEK), 1, None)
    made = as_micros(NOW - WEEK)
    row = Notification(UUID(int=1), "h", "Opened", "{}", "PENDING", 0, made, made, 1, None)

    assert not queue.is_too_old(row, as_micros(NOW))
    assert queue.is_too_old(row, as_micros(NOW) + 1)


def test_a_moment_as_microseconds_is_the_same_moment() -> None:
    for moment in (NOW, datetime(1970, 1, 1), datetime(1999, 12, 31, 23, 59, 59, 999999), datetime(9999, 12, 31)):
        assert from_micros(as_micros(moment)) == moment
