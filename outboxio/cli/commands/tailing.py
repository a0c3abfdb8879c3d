"""``outboxio tail``: notifications as they change."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.cli.answer import Exit, line, say
from outboxio.cli.choice import Choice
from outboxio.cli.inside import admin_of, now_of
from outboxio.cli.shown import last_error, moment, say_lines, shortened, state_of
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Filter
from outboxio.outbox import Outbox

FIRST = 200
"""The notifications of the first look, unless a date says since when."""
_AT_ONCE = 500  # notifications that a query reads
_OVERLAP = timedelta(seconds=10)  # a change is seen this much later than its date: clocks differ, and commits take time
_SHARE_OF_LOOKS = 4  # between two looks the command waits for at least 4 times the duration of a look


class Looks(Struct, frozen=True):
    """How often to look."""

    follow: bool
    every: float
    """Seconds between two looks."""


async def tail(outbox: Outbox, choice: Choice, looks: Looks, *, as_json: bool) -> Exit:
    """Print notifications as they change, the oldest change first; with ``follow``, until a signal or ``--until``."""
    wanted = choice.filter()
    changes = Changes(outbox, wanted)
    began = time.monotonic()
    rows = await changes.first()
    while True:
        for record in rows:
            _tell(record, as_json=as_json)
        if not looks.follow or (wanted.until is not None and changes.since >= wanted.until):
            return Exit.FINE
        await asyncio.sleep(max(looks.every, _SHARE_OF_LOOKS * (time.monotonic() - began)))
        began = time.monotonic()
        rows = await changes.next()


class Changes:
    """The changes of the notifications that match a filter, look by look. Each look reads on until nothing is left."""

    def __init__(self, outbox: Outbox, wanted: Filter) -> None:
        self._admin = admin_of(outbox)
        self._outbox = outbox
        self._wanted = wanted
        self._seen: dict[UUID, tuple[datetime, Any]] = {}
        self.since = datetime.min
        """A later look asks for changes from this moment on."""

    async def first(self) -> list[NotificationRecord]:
        """The newest notifications that match, or all changes since the date of the filter; the oldest change first."""
        begun = await now_of(self._outbox)
        rows = await self._read(self._wanted, None if self._wanted.since is not None else FIRST)
        return self._fresh(rows, begun)

    async def next(self) -> list[NotificationRecord]:
        """The changes since the last look, the oldest first. Of several changes of a notification, the last."""
        begun = await now_of(self._outbox)
        return self._fresh(await self._read(replace(self._wanted, since=self.since), None), begun)

    async def _read(self, filter: Filter, most: int | None) -> list[NotificationRecord]:
        rows: list[NotificationRecord] = []
        after: str | None = None
        while most is None or len(rows) < most:
            page = await self._admin.list(filter, _AT_ONCE if most is None else most - len(rows), after)
            rows += page
            if page.next is None:
                break
            after = page.next
        return rows

    def _fresh(self, rows: list[NotificationRecord], begun: datetime) -> list[NotificationRecord]:
        """The rows that were not seen in their present state. ``begun``: when the look began."""
        fresh = {row.id: row for row in rows if self._seen.get(row.id) != (row.updated_date, row.state)}
        self._seen |= {row.id: (row.updated_date, row.state) for row in fresh.values()}
        self.since = max(begun - _OVERLAP, self._wanted.since or datetime.min)
        self._seen = {id: seen for id, seen in self._seen.items() if seen[0] >= self.since}
        return sorted(fresh.values(), key=lambda row: row.updated_date)


def _tell(record: NotificationRecord, *, as_json: bool) -> None:
    if as_json:
        say_lines([record])
        return
    told = f"  {record.handler_name}  {record.event_type} {record.event_id}  {shortened(last_error(record))}"
    say(line(moment(record.updated_date), "  ").append(state_of(f"{record.state:<9}")).append(line(told.rstrip())))
