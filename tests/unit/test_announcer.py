"""How often an instance announces its handlers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from outboxio.fanout.fanout import LONGEST_UNSEEN, Announcer
from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.handlers.options import Subscription
from outboxio.model.event import Event, EventTypes
from outboxio.storage.protocols import Waiting
from outboxio.support.clock import ShardClock
from outboxio.testing import MovableClock

WEEK = timedelta(days=7)


class Opened(Event):
    number: int


async def handle(envelope: object) -> None:
    return None


class Announced:
    """A database that remembers the times of announcements."""

    def __init__(self) -> None:
        self.times: list[datetime] = []

    @property
    def subscriptions(self) -> Announced:
        return self

    @property
    def stored_events(self) -> Announced:
        return self

    async def announced(self, namespace: str) -> list[Subscription]:
        return []

    async def count_waiting(self, namespace: str, keys: Sequence[str], limit: int, *, are_topics: bool) -> Waiting:
        return Waiting(0, None)

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        self.times.append(now)


@pytest.mark.parametrize(
    ("step", "number"),
    [(timedelta(0), 1), (LONGEST_UNSEEN / 2, 1), (LONGEST_UNSEEN, 2), (-LONGEST_UNSEEN / 2, 1), (-WEEK, 2)],
)
async def test_handlers_are_announced_again_after_a_clock_change_in_either_direction(
    step: timedelta, number: int
) -> None:
    clock, database, handlers = MovableClock(), Announced(), HandlerRegistry(EventTypes())
    handlers.add(make_handler(handle, name="h", event_types=(Opened,), aliases=(), topic=None, where="here"))
    announcer = Announcer("app", cast(Any, database), handlers, ShardClock(clock), WEEK, "me")

    await announcer.announce_if_due()
    clock.set(clock.now() + step)
    await announcer.announce_if_due()

    assert len(database.times) == number
