"""Queries about notifications: lists, counts, groups of failures, exports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from uuid import UUID

from msgspec.structs import replace

from outboxio.errors import ConfigurationError
from outboxio.health.facts import ShardFacts
from outboxio.health.reasons import explain
from outboxio.health.values import brief
from outboxio.model.notification import TERMINAL, NotificationRecord, State
from outboxio.model.operating.groups import Filter, Group, Groups, PageCursor, Search, fingerprint
from outboxio.model.operating.operation import BoundedCount, Page
from outboxio.model.redaction import Redact, redacted_record
from outboxio.operations.arguments import RequestedTypes, id_argument, limit_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import (
    FAILURES,
    Cursor,
    chosen_filter,
    cursor_of,
    filter_argument,
    merged,
    no_cursor,
    search_of,
)
from outboxio.operations.stranded import Stranded, count_unroutable, find_stranded
from outboxio.storage.protocols import Database, Found, LastError
from outboxio.storage.tables.scans import is_page_cursor

MAX_COUNTED = 10_000
MAX_GROUPED = 500
_EXPORTED_AT_ONCE = 500
_PATIENCE = 1.0  # seconds for the overview; the notification is shown even without it
_MAX_OF_EVENT = 10_000  # notifications: a handler name has at most one


class NotificationQueries(AdminBase):
    """A part of ``Admin``."""

    async def counts(self, *, shard: str | None = None) -> dict[str, int]:
        """Count the notifications in each state, and the ``undelivered`` and ``unroutable`` ones.

        ``undelivered``: events that were not fanned out yet, including events without any subscriber. ``unroutable``:
        unfinished notifications of handlers, or of event versions, that no process has.

        Reads all stored notifications. For a page or a probe, use :meth:`overview`.

        Example::

            {"PENDING": 0, ..., "SUCCEEDED": 12, "DEAD": 1, "undelivered": 3, "unroutable": 0}
        """
        counts = {**dict.fromkeys(map(str, State), 0), "undelivered": 0, "unroutable": 0}
        for one in self._shards.chosen(shard):
            for state, number in (await one.database.stored_notifications.count_states(self._namespace)).items():
                counts[state] = counts.get(state, 0) + number
            counts["unroutable"] += await count_unroutable(one.database, self._namespace, one.clock, self._settings)
        return counts

    async def count(
        self, filter: Filter | None = None, *, most: int = MAX_COUNTED, shard: str | None = None
    ) -> BoundedCount:
        """Count the notifications that match a filter, up to ``most`` on each shard.

        If no index covers the filter, the count may stop earlier, after some thousand rows were read;
        ``is_complete`` is then False.

        Raises :class:`ConfigurationError` for a filter that no notification can match, :class:`UnknownHandler` and
        :class:`UnknownEventType` for an unknown name.

        Example::

            dead = await outbox.admin.count(Filter(states=("DEAD",), handler="invoice-pdf"))
            print(dead, dead.is_complete)  # 10,000+ False
        """
        filter, most = filter_argument(filter), limit_argument(most)
        number, is_complete = 0, True
        for database in self._shards.databases(shard):
            counted = await database.search.count(self._namespace, await self._search(filter, database), most)
            number += counted.number
            is_complete &= counted.is_complete
        if not number:
            await self._refuse_unknown_names(filter, shard)
        return BoundedCount(number, is_complete=is_complete)

    async def list(
        self,
        filter: Filter | State | str | None = None,
        limit: int = 100,
        after: str | UUID | None = None,
        *,
        state: State | str | None = None,
        handler: str | None = None,
        event_type: str | None = None,
        documents: bool = True,
        shard: str | None = None,
    ) -> Page[NotificationRecord]:
        """Return the notifications that match, newest first; at most ``limit``. ``page.next`` continues the list.

        ``filter``: a :class:`Filter`, or the name of a state. ``state``, ``handler`` and ``event_type`` are shortcuts
        for a filter with a single field. ``after``: ``page.next`` of the previous page, or, with a single shard, the id
        of its last notification. ``documents=False`` omits payload, parameters and headers, which may be large.

        DEAD and EXPIRED notifications are sorted by when they ended, waiting notifications by their due date, and
        others by the sequence of the event. A page can be shorter than ``limit`` although there is a next page, because
        a read ends after a bounded number of rows.

        Payloads, parameters, headers and errors are redacted by ``Outbox(redact=...)``. A document that was nested too
        deeply by another tool is replaced by a note.

        Raises :class:`ConfigurationError` for an unknown state, :class:`UnknownHandler` and :class:`UnknownEventType`
        for an unknown name.

        Example::

            for record in await outbox.admin.list(state="DEAD"):
                print(record.handler_name, record.event_id, record.errors[-1]["message"])
        """
        selected = chosen_filter(filter, state, handler, event_type)
        limit = limit_argument(limit)
        page = await self._page(selected, limit, after, shard, documents=documents)
        if not page and page.next is None and after is None:
            await self._refuse_unknown_names(selected, shard)
        return page

    async def groups(
        self, filter: Filter | None = None, *, limit: int = MAX_GROUPED, shard: str | None = None
    ) -> Groups[Group]:
        """Group the failures that match by handler and error, the largest group first.

        Errors are grouped if they differ only in numbers, ids, e-mail addresses and quoted values. A filter without
        states selects DEAD, EXPIRED, FAILED and DYING notifications. The newest ``limit`` of each shard are grouped;
        ``str`` of the result shows this: ``grouped over the newest 500 of 4,310``.

        ``group.filter`` selects all notifications of the group. If the error of one group is part of the error of
        another, its filter selects both: ``retry(group.filter, dry_run=True)`` returns the number.

        Example::

            groups = await outbox.admin.groups()
            print(groups)
            for group in groups:
                print(group.count, group.handler_name, group.fingerprint, group.last_seen)
        """
        filter, limit = filter_argument(filter, states=FAILURES), limit_argument(limit)
        errors: dict[str, Sequence[LastError]] = {}
        of, is_complete = 0, True
        for database in self._shards.databases(shard):
            search = await self._search(filter, database)
            errors[database.name] = (await database.search.last_errors(self._namespace, search, limit)).rows
            counted = await database.search.count(self._namespace, search, max(MAX_COUNTED, limit))
            of += counted.number
            is_complete &= counted.is_complete
        looked_at = sum(map(len, errors.values()))
        if not looked_at:
            await self._refuse_unknown_names(filter, shard)
        of = BoundedCount(max(of, looked_at), is_complete=is_complete)
        return Groups(grouped(errors, filter, self._redact), looked_at, of)

    async def inspect(self, id: UUID, *, documents: bool = True, shard: str | None = None) -> Inspected:
        """Return the notification with this id, or all notifications of the event with this id; empty if unknown.

        ``reason`` of the result explains why the unfinished notifications have not run, and ``reasons`` does so for
        each, by id. ``documents=False`` omits payload, parameters and headers, and requires the id of an event.

        Example::

            found = await outbox.admin.inspect(notification_id)
            print(found.reason)  # Waits for its retry at 2030-01-01 12:00:30 UTC, after attempt 3 failed.
            (record,) = found
            print(record.state, record.attempts, record.errors)
        """
        records: list[NotificationRecord] = []
        chosen = [id_argument(id)]
        for database in self._shards.databases(shard):
            if documents:
                records += await database.stored_notifications.select_by_id(self._namespace, chosen)
            else:
                records += await database.event_search.notifications_of(self._namespace, chosen, _MAX_OF_EVENT)
        records.sort(key=lambda record: (record.handler_name, record.created_date))
        found = Inspected(self._redacted(records))
        found.reasons = {one.id: await self._reason(one) for one in records if one.state not in TERMINAL}
        return found

    async def _reason(self, record: NotificationRecord) -> str:
        try:
            async with asyncio.timeout(_PATIENCE):
                facts, _ = await self._setup.overviews.read()
        except TimeoutError:
            return f"Unknown: the overview was not read within {_PATIENCE:g} s."
        except Exception as error:  # such as a missing privilege; the notification itself is shown anyway
            return f"Unknown: {brief(self._redact(str(error)))}"
        shard = next(one for one in facts.shards if one.name == record.shard)
        head = await self._head(record, shard) if record.state == State.BLOCKED else None
        if head is None or head.id == record.id:
            return explain(record, shard)
        ended = f"It ended {head.state}: retry or skip it."
        own = ended if head.state in TERMINAL else f"That one: {explain(head, shard)}"
        return f"{explain(record, shard, f'`{head.id}`')} {own}"

    async def _head(self, record: NotificationRecord, shard: ShardFacts) -> NotificationRecord | None:
        """Return the first unfinished notification of an ordering key, which blocks the others."""
        if record.ordering_key is None:
            return None
        handler = shard.handler_of(record.handler_name)
        names = [record.handler_name] if handler is None else [handler.name, *handler.aliases]
        [database] = self._shards.databases(record.shard)
        return await database.stored_notifications.first_of_key(self._namespace, names, record.ordering_key)

    async def export(
        self, filter: Filter | None = None, *, shard: str | None = None
    ) -> AsyncIterator[NotificationRecord]:
        """Iterate over all notifications that match, as :meth:`list` returns them.

        Notifications that change during the export may be missing or appear twice.

        Example::

            async for record in outbox.admin.export(Filter(states=("DEAD",))):
                print(record.id, record.payload)
        """
        after: str | None = None
        while True:
            page = await self.list(filter, _EXPORTED_AT_ONCE, after, shard=shard)
            for record in page:
                yield record
            if page.next is None:
                return
            after = page.next

    async def stranded(self, *, shard: str | None = None) -> Sequence[Stranded]:
        """Return the handler names with unfinished notifications that no process has had for some minutes or longer.

        The usual cause is a rename without an alias. A name that no process has had for ``subscription_ttl`` is not
        included: :meth:`counts` counts its notifications as ``unroutable``.

        Example::

            for stranded in await outbox.admin.stranded():
                print(stranded.handler_name, stranded.unfinished, stranded.last_seen_date)
        """
        found: list[Stranded] = []
        for one in self._shards.chosen(shard):
            found += await find_stranded(one.database, self._namespace, one.clock() - self._settings.subscription_ttl)
        return found

    async def payloads(self, event_types: Sequence[str], *, shard: str | None = None) -> Sequence[str]:
        """Return the stored payloads of events of these types, as JSON texts, in the order of their sequence.

        This is for programs that need the original payloads: ``redact`` is not called.
        """
        names = RequestedTypes(event_types).names
        found: list[str] = []
        for database in self._shards.databases(shard):
            found += await database.stored_events.payloads(self._namespace, names)
        return found

    # --- inside ----------------------------------------------------------------------------------

    async def _page(
        self, filter: Filter, limit: int, after: str | UUID | None, shard: str | None, *, documents: bool
    ) -> Page[NotificationRecord]:
        databases = {database.name: database for database in self._shards.databases(shard)}
        searches = {name: await self._search(filter, database) for name, database in databases.items()}
        cursors = await self._cursors(filter, after, databases, searches)
        found: dict[str, Found[NotificationRecord, PageCursor]] = {}
        for name, cursor in cursors.items():
            search = databases[name].search
            try:
                found[name] = await search.find(self._namespace, searches[name], limit, cursor, documents=documents)
            except Exception as error:
                if cursor is not None and databases[name].refuses_value(error):
                    raise no_cursor(after) from error
                raise
        chosen = merged([each.rows for each in found.values()], limit)
        reached: dict[str, PageCursor | None] = {}
        for name, each in found.items():
            taken = sum(record.shard == name for record in chosen)
            if taken == len(each.rows):
                if each.next is not None:
                    reached[name] = each.next
            elif not taken:
                reached[name] = cursors[name]
            else:
                last = each.rows[taken - 1].id
                reached[name] = await databases[name].search.cursor_of_notification(
                    self._namespace, searches[name], last
                )
        return Page(self._redacted(chosen), Cursor(reached).text(filter))

    async def _cursors(
        self, filter: Filter, after: object, databases: dict[str, Database], searches: dict[str, Search]
    ) -> dict[str, PageCursor | None]:
        """Return the cursors of the shards. A shard that was read to the end is omitted."""
        if after is None:
            return dict.fromkeys(databases)
        id = _as_id(after)
        if id is None:
            cursor = cursor_of(str(after), filter, PageCursor, is_page_cursor)
            return {name: position for name, position in cursor.positions.items() if name in databases}
        if len(databases) > 1:
            raise ConfigurationError(
                f"after is the id {id}, and the list has {len(databases)} shards; pass page.next, or name the shard"
            )
        [(name, database)] = databases.items()
        position = await database.search.cursor_of_notification(self._namespace, searches[name], id)
        if position is None:
            raise ConfigurationError(f"after is {id}, but there is no such notification; pass page.next, or a known id")
        return {name: position}

    async def _search(self, filter: Filter, database: Database) -> Search:
        return await search_of(filter, database, self._known, self._types)

    async def _refuse_unknown_names(self, filter: Filter, shard: str | None) -> None:
        databases = self._shards.databases(shard)
        if filter.handler is not None:
            await self._known.refuse_unknown(filter.handler, databases, among_rows=True)
        if filter.event_type is not None:
            await self._known.refuse_unknown_type(filter.event_type, databases)

    def _redacted(self, records: Iterable[NotificationRecord]) -> Sequence[NotificationRecord]:
        return [redacted_record(record, self._redact) for record in records]


class Inspected(list[NotificationRecord]):
    """The result of ``outbox.admin.inspect``: a list of notifications."""

    reasons: Mapping[UUID, str] = MappingProxyType({})
    """Why each unfinished notification has not run, by its id."""

    @property
    def reason(self) -> str | None:
        """Why the unfinished notifications have not run, each reason once; ``None`` if all are finished."""
        return " ".join(dict.fromkeys(self.reasons.values())) or None


def _as_id(after: object) -> UUID | None:
    """Return the id, or ``None`` for a page cursor. Raises :class:`ConfigurationError` for any other value."""
    if isinstance(after, UUID):
        return after
    if not isinstance(after, str):
        raise no_cursor(after)
    try:
        return UUID(after)
    except ValueError:
        return None


# --- groups of failures: equal handler and equal fingerprint --------------------------------------


def grouped(errors: Mapping[str, Sequence[LastError]], filter: Filter, redact: Redact) -> list[Group]:
    """Group the last errors of notifications, the largest group first.

    ``errors``: by shard. ``filter``: the filter that selected the notifications.
    """
    groups: dict[tuple[str, str], list[tuple[str, LastError]]] = {}
    shown: dict[str, str] = {}  # by fingerprint: ``redact`` may be slow
    for shard, found in errors.items():
        for error in found:
            key = fingerprint(error.type, error.message)
            if key not in shown:
                # If ``redact`` changes the fingerprint, the message is hidden, and errors are grouped by type.
                shown[key] = key if redact(key) == key else f"{error.type}: *"
            groups.setdefault((error.handler_name, shown[key]), []).append((shard, error))
    made = [_group(name, shown, members, filter, redact) for (name, shown), members in groups.items()]
    return sorted(made, key=lambda group: (-group.count, group.handler_name, group.fingerprint))


def _group(name: str, shown: str, members: Sequence[tuple[str, LastError]], filter: Filter, redact: Redact) -> Group:
    newest = max((error for _, error in members), key=lambda error: error.updated_date)
    shards = sorted({shard for shard, _ in members})
    return Group(
        handler_name=name,
        fingerprint=shown,
        count=len(members),
        first_seen=min(error.updated_date for _, error in members),
        last_seen=newest.updated_date,
        sample=redact(f"{newest.type}: {newest.message}"),
        notification_id=newest.id,
        event_id=newest.event_id,
        filter=replace(filter, handler=name, error=shown),
        shard=", ".join(shards),
    )
