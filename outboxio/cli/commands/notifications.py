"""``outboxio list``, ``list-events``, ``dead``, ``export`` and ``tail``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

import msgspec
from msgspec.structs import replace
from rich.text import Text

from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.filter_options import FilterOptions, filter_arguments
from outboxio.cli.internals import admin_of, now_of
from outboxio.cli.options import pasted
from outboxio.cli.output import (
    Exit,
    ago,
    echo,
    echo_json,
    echo_json_lines,
    echo_stderr,
    json_of,
    last_error,
    line,
    shortened,
    state_of,
    timestamp,
)
from outboxio.cli.target import TargetError
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Filter, Group
from outboxio.model.operating.operation import Page, StoredEvent
from outboxio.operations.declared import counted
from outboxio.outbox import Outbox

_COMMANDS = 10  # that a list of groups shows


async def list_notifications(
    outbox: Outbox, filters: FilterOptions, limit: int, after: str | None, *, as_json: bool
) -> Exit:
    """Print the newest notifications that match."""
    page = await admin_of(outbox).list(filters.filter(), limit, after)
    if as_json:
        echo_json({"rows": list(page), "next": page.next})
        return Exit.OK
    if not page:
        echo(line(("no matches", "dim")))
    else:
        shown = Rows("id", "state", "handler", "event", "changed", Column("tries", right=True))
        for record in page:
            event = record.event_type + (f" {record.model_id}" if record.model_id is not None else "")
            shown.add(
                str(record.id), state_of(record.state), line(record.handler_name), line(event),
                ago(record.updated_date), f"{record.attempts:,}", below=line(shortened(last_error(record))),
            )  # fmt: skip
        echo(shown)
    _print_next(page.next)
    return Exit.OK


async def events(outbox: Outbox, filters: FilterOptions, limit: int, after: str | None, *, as_json: bool) -> Exit:
    """Print the newest events that match."""
    page: Page[StoredEvent] = await admin_of(outbox).events(filters.filter(), limit, after)
    if as_json:
        echo_json({"rows": list(page), "next": page.next})
        return Exit.OK
    if not page:
        echo(line(("no matches", "dim")))
    else:
        shown = Rows("id", "type", "model", "action", "date (UTC)", "fanned out")
        for event in page:
            model = " ".join(filter(None, (event.model_type, event.model_id)))
            fanned_out = Text("yes", "dim") if event.is_delivered else Text("not yet", "yellow")
            shown.add(
                str(event.id), line(event.event_type or "(no event)"), line(model), line(event.action_name),
                timestamp(event.event_date), fanned_out,
            )  # fmt: skip
        echo(shown)
    _print_next(page.next)
    return Exit.OK


async def dead(outbox: Outbox, filters: FilterOptions, by: str, *, as_json: bool) -> Exit:
    """Print the dead letters in groups, each with the command to retry it."""
    if by not in ("error", "handler"):
        raise TargetError(f"--by {by}: expected error or handler")
    groups = await admin_of(outbox).groups(filters.filter("DEAD", "EXPIRED"))
    if as_json:
        echo_json({"scope": str(groups), "looked_at": groups.looked_at, "of": int(groups.of), "groups": list(groups)})
        return Exit.OK
    if not groups:
        echo(line(("ok", "green"), "  no dead letters match"))
        return Exit.OK
    echo(line((str(groups), "dim")), "")
    shown = Rows(Column("count", right=True), "handler", Column("error", folds=True), "last seen")
    chosen = groups if by == "error" else _by_handler(groups)
    for group in chosen:
        name = line((group.handler_name, "bold"))
        shown.add(f"{group.count:,}", name, line(group.fingerprint), ago(group.last_seen))
    heading = "to retry a group:" if len(chosen) > 1 else "to retry these:"
    echo(shown, "", line((heading, "dim")), *(line("  ", retry_command(group)) for group in chosen[:_COMMANDS]))
    if len(chosen) > _COMMANDS:
        echo(line(("  ... and more; --json prints the filter of every group", "dim")))
    return Exit.OK


def retry_command(group: Group) -> str:
    """Return the command that retries the notifications of a group."""
    return pasted("retry", *filter_arguments(group.filter))


async def export(outbox: Outbox, filters: FilterOptions, file: Path | None, *, as_json: bool) -> Exit:
    """Write all notifications that match, redacted, as one JSON object per line, with or without ``--json``."""
    filter, number = filters.filter("DEAD", "EXPIRED"), 0
    if file is None:
        async for record in admin_of(outbox).export(filter):
            echo_json_lines([record])
        return Exit.OK
    with _opened(file) as written:
        async for record in admin_of(outbox).export(filter):
            written.write(f"{json_of(record)}\n".encode())
            number += 1
    echo_stderr(line(("ok", "green"), f"  wrote {number:,} notifications into {file}"))
    return Exit.OK


def _opened(file: Path) -> BinaryIO:
    """Create a file. Raises :class:`TargetError` if it exists, or cannot be created."""
    try:
        return file.open("xb")
    except FileExistsError:
        raise TargetError(f"--output: {file} already exists; choose another name") from None
    except OSError as error:
        raise TargetError(f"--output: cannot write {file}: {error.strerror}") from error


# --- helpers --------------------------------------------------------------------------------------


def _print_next(next: str | None) -> None:
    if next is not None:
        echo_stderr(line((f"to see older ones, add: --after {next}", "dim")))


def _by_handler(groups: Sequence[Group]) -> Sequence[Group]:
    """Add up the groups by handler, with the most frequent error; largest first."""
    added: dict[str, Group] = {}
    kinds = Counter(group.handler_name for group in groups)
    for group in groups:  # largest first
        name = group.handler_name
        former = added.get(name)
        others = f" (and {counted(kinds[name] - 1, 'other error')})" if kinds[name] > 1 else ""
        added[name] = msgspec.structs.replace(
            former or group,
            fingerprint=former.fingerprint if former is not None else f"{group.fingerprint}{others}",
            count=group.count + (former.count if former is not None else 0),
            last_seen=group.last_seen if former is None else max(group.last_seen, former.last_seen),
            filter=msgspec.structs.replace(group.filter, error=None) if kinds[name] > 1 else group.filter,
        )
    return sorted(added.values(), key=lambda group: -group.count)


# --- ``outboxio tail``: notifications as they change ----------------------------------------------


FIRST = 200
"""The number of notifications that are shown first, without ``--since``."""
_PAGE_SIZE = 500
_OVERLAP = timedelta(seconds=10)  # changes may become visible later than their date: clocks differ, commits take time
_IDLE_FACTOR = 4  # wait for at least 4 times the duration of a poll between two polls


async def tail(outbox: Outbox, filters: FilterOptions, every: float, *, follow: bool, as_json: bool) -> Exit:
    """Print notifications as they change, oldest change first; with ``follow``, until a signal or ``--until``.

    ``every``: seconds between two polls.
    """
    query = filters.filter()
    changes = Changes(outbox, query)
    began = time.monotonic()
    rows = await changes.first()
    while True:
        for record in rows:
            _print_record(record, as_json=as_json)
        if not follow or (query.until is not None and changes.since >= query.until):
            return Exit.OK
        await asyncio.sleep(max(every, _IDLE_FACTOR * (time.monotonic() - began)))
        began = time.monotonic()
        rows = await changes.next()


class Changes:
    """The changes of the notifications that match a filter. Each poll reads all pages."""

    def __init__(self, outbox: Outbox, query: Filter) -> None:
        self._admin = admin_of(outbox)
        self._outbox = outbox
        self._query = query
        self._seen: dict[UUID, tuple[datetime, Any]] = {}
        self.since = datetime.min
        """The next poll reads the changes since this time."""

    async def first(self) -> list[NotificationRecord]:
        """Return the newest notifications that match, or all changes since the filter's date; oldest change first."""
        started = await now_of(self._outbox)
        rows = await self._read(self._query, None if self._query.since is not None else FIRST)
        return self._fresh(rows, started)

    async def next(self) -> list[NotificationRecord]:
        """Return the changes since the last poll, oldest first; of each notification, only the last change."""
        started = await now_of(self._outbox)
        return self._fresh(await self._read(replace(self._query, since=self.since), None), started)

    async def _read(self, filter: Filter, limit: int | None) -> list[NotificationRecord]:
        rows: list[NotificationRecord] = []
        after: str | None = None
        while limit is None or len(rows) < limit:
            page = await self._admin.list(filter, _PAGE_SIZE if limit is None else limit - len(rows), after)
            rows += page
            if page.next is None:
                break
            after = page.next
        return rows

    def _fresh(self, rows: list[NotificationRecord], started: datetime) -> list[NotificationRecord]:
        """Return the rows that were not yet seen in their current state. ``started``: when the poll started."""
        fresh = {row.id: row for row in rows if self._seen.get(row.id) != (row.updated_date, row.state)}
        self._seen |= {row.id: (row.updated_date, row.state) for row in fresh.values()}
        self.since = max(started - _OVERLAP, self._query.since or datetime.min)
        self._seen = {id: seen for id, seen in self._seen.items() if seen[0] >= self.since}
        return sorted(fresh.values(), key=lambda row: row.updated_date)


def _print_record(record: NotificationRecord, *, as_json: bool) -> None:
    if as_json:
        echo_json_lines([record])
        return
    text = f"  {record.handler_name}  {record.event_type} {record.event_id}  {shortened(last_error(record))}"
    echo(line(timestamp(record.updated_date), "  ").append(state_of(f"{record.state:<9}")).append(line(text.rstrip())))
