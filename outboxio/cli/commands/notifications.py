"""``outboxio list``, ``dead``, ``events``, ``export``: notifications and events."""

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

from outboxio.cli.answer import (
    Exit,
    ago,
    json_of,
    last_error,
    line,
    moment,
    say,
    say_aside,
    say_json,
    say_lines,
    shortened,
    state_of,
)
from outboxio.cli.choice import Choice, words_of
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import admin_of, now_of
from outboxio.cli.options import pasted
from outboxio.cli.target import TargetError
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Filter, Group
from outboxio.model.operating.operation import Page, StoredEvent
from outboxio.operations.declared import counted
from outboxio.outbox import Outbox

_COMMANDS = 10  # that a list of groups shows


async def list_notifications(outbox: Outbox, choice: Choice, limit: int, after: str | None, *, as_json: bool) -> Exit:
    """Print the newest notifications that match."""
    page = await admin_of(outbox).list(choice.filter(), limit, after)
    if as_json:
        say_json({"rows": list(page), "next": page.next})
        return Exit.FINE
    if not page:
        say(line(("nothing matches", "dim")))
    else:
        shown = Rows("id", "state", "handler", "event", "changed", Column("tries", right=True))
        for record in page:
            event = record.event_type + (f" {record.model_id}" if record.model_id is not None else "")
            shown.add(
                str(record.id), state_of(record.state), line(record.handler_name), line(event),
                ago(record.updated_date), f"{record.attempts:,}", below=line(shortened(last_error(record))),
            )  # fmt: skip
        say(shown)
    _tell_next(page.next)
    return Exit.FINE


async def events(outbox: Outbox, choice: Choice, limit: int, after: str | None, *, as_json: bool) -> Exit:
    """Print the newest events that match."""
    page: Page[StoredEvent] = await admin_of(outbox).events(choice.filter(), limit, after)
    if as_json:
        say_json({"rows": list(page), "next": page.next})
        return Exit.FINE
    if not page:
        say(line(("nothing matches", "dim")))
    else:
        shown = Rows("id", "type", "model", "action", "date (UTC)", "fanned out")
        for event in page:
            model = " ".join(filter(None, (event.model_type, event.model_id)))
            fanned_out = Text("yes", "dim") if event.is_delivered else Text("not yet", "yellow")
            shown.add(
                str(event.id), line(event.event_type or "(no event)"), line(model), line(event.action_name),
                moment(event.event_date), fanned_out,
            )  # fmt: skip
        say(shown)
    _tell_next(page.next)
    return Exit.FINE


async def dead(outbox: Outbox, choice: Choice, by: str, *, as_json: bool) -> Exit:
    """Print the failures in groups, each with the command that retries the group."""
    if by not in ("error", "handler"):
        raise TargetError(f"--by {by}: expected error or handler")
    groups = await admin_of(outbox).groups(choice.filter("DEAD", "EXPIRED"))
    if as_json:
        say_json({"scope": str(groups), "looked_at": groups.looked_at, "of": int(groups.of), "groups": list(groups)})
        return Exit.FINE
    if not groups:
        say(line(("ok", "green"), "  no dead letters match"))
        return Exit.FINE
    say(line((str(groups), "dim")), "")
    shown = Rows(Column("number", right=True), "handler", Column("error", folds=True), "last seen")
    chosen = groups if by == "error" else _by_handler(groups)
    for group in chosen:
        name = line((group.handler_name, "bold"))
        shown.add(f"{group.number:,}", name, line(group.fingerprint), ago(group.last_seen))
    told = "to retry a group:" if len(chosen) > 1 else "to retry these:"
    say(shown, "", line((told, "dim")), *(line("  ", retry_command(group)) for group in chosen[:_COMMANDS]))
    if len(chosen) > _COMMANDS:
        say(line(("  and so on: the filter of every group is in the answer with --json", "dim")))
    return Exit.FINE


def retry_command(group: Group) -> str:
    """The command that retries the notifications of a group."""
    return pasted("retry", *words_of(group.filter))


async def export(outbox: Outbox, choice: Choice, file: Path | None, *, as_json: bool) -> Exit:
    """Write all notifications that match, one JSON object on each line, redacted. The lines are JSON in any case."""
    filter, number = choice.filter("DEAD", "EXPIRED"), 0
    if file is None:
        async for record in admin_of(outbox).export(filter):
            say_lines([record])
        return Exit.FINE
    with _opened(file) as written:
        async for record in admin_of(outbox).export(filter):
            written.write(f"{json_of(record)}\n".encode())
            number += 1
    say_aside(line(("ok", "green"), f"  wrote {number:,} notifications into {file}"))
    return Exit.FINE


def _opened(file: Path) -> BinaryIO:
    """A new file. Raises :class:`TargetError` for a file that exists, and for a folder that does not exist."""
    try:
        return file.open("xb")
    except FileExistsError:
        raise TargetError(f"--output {file}: the file exists already; give the name of a new file") from None
    except OSError as error:
        raise TargetError(f"--output {file} cannot be written: {error.strerror}; give another name") from error


# --- in words ------------------------------------------------------------------------------------


def _tell_next(next: str | None) -> None:
    if next is not None:
        say_aside(line((f"to see older ones, add: --after {next}", "dim")))


def _by_handler(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups added up by handler, with the most frequent error; the largest first."""
    added: dict[str, Group] = {}
    kinds = Counter(group.handler_name for group in groups)
    for group in groups:  # the largest first
        name = group.handler_name
        former = added.get(name)
        others = f" (and {counted(kinds[name] - 1, 'other error')})" if kinds[name] > 1 else ""
        added[name] = msgspec.structs.replace(
            former or group,
            fingerprint=former.fingerprint if former is not None else f"{group.fingerprint}{others}",
            number=group.number + (former.number if former is not None else 0),
            last_seen=group.last_seen if former is None else max(group.last_seen, former.last_seen),
            filter=msgspec.structs.replace(group.filter, error=None) if kinds[name] > 1 else group.filter,
        )
    return sorted(added.values(), key=lambda group: -group.number)


# --- ``outboxio tail``: notifications as they change ----------------------------------------------


FIRST = 200
"""The notifications of the first look, unless a date says since when."""
_AT_ONCE = 500  # notifications that a query reads
_OVERLAP = timedelta(seconds=10)  # a change is seen this much later than its date: clocks differ, and commits take time
_SHARE_OF_LOOKS = 4  # between two looks the command waits for at least 4 times the duration of a look


async def tail(outbox: Outbox, choice: Choice, every: float, *, follow: bool, as_json: bool) -> Exit:
    """Print notifications as they change, the oldest change first; with ``follow``, until a signal or ``--until``.

    ``every``: seconds between two looks.
    """
    wanted = choice.filter()
    changes = Changes(outbox, wanted)
    began = time.monotonic()
    rows = await changes.first()
    while True:
        for record in rows:
            _tell(record, as_json=as_json)
        if not follow or (wanted.until is not None and changes.since >= wanted.until):
            return Exit.FINE
        await asyncio.sleep(max(every, _SHARE_OF_LOOKS * (time.monotonic() - began)))
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
