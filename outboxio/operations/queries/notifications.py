"""The questions of an operator about notifications: lists, counts, groups of failures, exports."""

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
from outboxio.model.operating.groups import Filter, Group, Groups, Place, Search, fingerprint
from outboxio.model.operating.operation import BoundedCount, Page
from outboxio.model.redaction import Redact, redacted_record
from outboxio.operations.arguments import GivenTypes, given_id, given_limit
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import (
    FAILURES,
    Cursor,
    chosen_filter,
    cursor_of,
    given_filter,
    merged,
    no_cursor,
    search_of,
)
from outboxio.operations.stranded import Stranded, count_unroutable, find_stranded
from outboxio.storage.protocols import Database, Found, LastError
from outboxio.storage.tables.walks import is_place
from outboxio.support.text import briefly

MOST_COUNTED = 10_000
MOST_GROUPED = 500
_EXPORTED_AT_ONCE = 500
_PATIENCE = 1.0  # seconds for the overview, without which a notification is shown all the same
_MOST_OF_EVENT = 10_000  # notifications: a handler name has at most one


class Questions(AdminBase):
    """A part of ``Admin``."""

    async def counts(self, *, shard: str | None = None) -> dict[str, int]:
        """The number of notifications in each state, with ``undelivered`` and ``unroutable``.

        ``undelivered``: events that were not fanned out yet, including events without any subscriber. ``unroutable``:
        unfinished notifications of handlers, or of event versions, that no process has.

        Reads all notifications that retention keeps. For a page or a probe, ask :meth:`overview`.

        Example::

            {"PENDING": 0, ..., "SUCCEEDED": 12, "DEAD": 1, "undelivered": 3, "unroutable": 0}
        """
        counts = {**dict.fromkeys(map(str, State), 0), "undelivered": 0, "unroutable": 0}
        for one in self._shards.chosen(shard):
            for state, number in (await one.database.stored_notifications.count_states(self._namespace)).items():
                counts[state] = counts.get(state, 0) + number
            counts["undelivered"] += await one.database.stored_events.count_undelivered(self._namespace)
            counts["unroutable"] += await count_unroutable(one.database, self._namespace, one.clock, self._settings)
        return counts

    async def count(
        self, filter: Filter | None = None, *, most: int = MOST_COUNTED, shard: str | None = None
    ) -> BoundedCount:
        """The number of notifications that match a filter, counted up to ``most`` on each shard.

        The count ends earlier, and says so, where the indexes cannot tell which notifications match: after some
        thousand notifications were read.

        Raises :class:`ConfigurationError` for a filter that no notification can match, :class:`UnknownHandler` and
        :class:`UnknownEventType` for an unknown name.

        Example::

            dead = await outbox.admin.count(Filter(states=("DEAD",), handler="invoice-pdf"))
            print(dead, dead.is_complete)  # 10,000+ False
        """
        wanted, most = given_filter(filter), given_limit(most)
        number, is_complete = 0, True
        for database in self._shards.databases(shard):
            counted = await database.search.count(self._namespace, await self._search(wanted, database), most)
            number += counted.number
            is_complete &= counted.is_complete
        if not number:
            await self._refuse_unknown_names(wanted, shard)
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
        """The notifications that match, the newest first; at most ``limit``. ``page.next`` goes on.

        ``filter``: a :class:`Filter`, or the name of a state. ``state``, ``handler`` and ``event_type`` are short for a
        filter with a single field. ``after``: ``page.next`` of the page before, or, with a single shard, the id of the
        last notification of that page. ``documents=False`` leaves out payload, parameters and headers: large documents
        are not read then.

        The newest is what an operator asks for: of DEAD and EXPIRED notifications the last end of each handler, of
        waiting notifications the latest due date, and otherwise the newest event. A page can be shorter than ``limit``
        although the list goes on: a read ends after a bounded number of rows.

        Payloads, parameters, headers and errors are shown as ``Outbox(redact=...)`` returns them. A document that
        cannot be shown, because a foreign tool has nested the document too deeply, is replaced by a text that says so.

        Raises :class:`ConfigurationError` for a state that does not exist, :class:`UnknownHandler` and
        :class:`UnknownEventType` for an unknown name.

        Example::

            for record in await outbox.admin.list(state="DEAD"):
                print(record.handler_name, record.event_id, record.errors[-1]["message"])
        """
        wanted = chosen_filter(filter, state, handler, event_type)
        limit = given_limit(limit)
        page = await self._page(wanted, limit, after, shard, documents=documents)
        if not page and page.next is None and after is None:
            await self._refuse_unknown_names(wanted, shard)
        return page

    async def groups(
        self, filter: Filter | None = None, *, limit: int = MOST_GROUPED, shard: str | None = None
    ) -> Groups[Group]:
        """The failures that match, grouped by handler and error, the largest group first.

        Two errors belong together if they differ in numbers, ids, e-mail addresses and quoted values only. A filter
        without states means DEAD, EXPIRED, FAILED and DYING notifications. The newest ``limit`` of each shard are
        grouped, and ``str`` says so: ``grouped over the newest 500 of 4,310``.

        ``group.filter`` selects all notifications of the group. A group whose error is a part of the error of a second
        group selects both: ``retry(group.filter, dry_run=True)`` says the number.

        Example::

            groups = await outbox.admin.groups()
            print(groups)
            for group in groups:
                print(group.number, group.handler_name, group.fingerprint, group.last_seen)
        """
        wanted, limit = given_filter(filter, states=FAILURES), given_limit(limit)
        errors: dict[str, Sequence[LastError]] = {}
        of, is_complete = 0, True
        for database in self._shards.databases(shard):
            search = await self._search(wanted, database)
            errors[database.name] = (await database.search.last_errors(self._namespace, search, limit)).rows
            counted = await database.search.count(self._namespace, search, max(MOST_COUNTED, limit))
            of += counted.number
            is_complete &= counted.is_complete
        looked_at = sum(map(len, errors.values()))
        if not looked_at:
            await self._refuse_unknown_names(wanted, shard)
        of = BoundedCount(max(of, looked_at), is_complete=is_complete)
        return Groups(grouped(errors, wanted, self._redact), looked_at, of)

    async def inspect(self, id: UUID, *, documents: bool = True, shard: str | None = None) -> Inspected:
        """The notification with this id, or all notifications of the event with this id; empty for an unknown id.

        ``reason`` says why the unfinished notifications have not run, and ``reasons`` says so of each, by id.
        ``documents=False`` leaves out payload, parameters and headers, and is for the id of an event.

        Example::

            found = await outbox.admin.inspect(notification_id)
            print(found.reason)  # Waits for its retry at 2030-01-01 12:00:30 UTC, after attempt 3 failed.
            (record,) = found
            print(record.state, record.attempts, record.errors)
        """
        records: list[NotificationRecord] = []
        chosen = [given_id(id)]
        for database in self._shards.databases(shard):
            if documents:
                records += await database.stored_notifications.select_by_id(self._namespace, chosen)
            else:
                records += await database.event_search.notifications_of(self._namespace, chosen, _MOST_OF_EVENT)
        records.sort(key=lambda record: (record.handler_name, record.created_date))
        found = Inspected(self._redacted(records))
        found.reasons = {one.id: await self._reason(one) for one in records if one.state not in TERMINAL}
        return found

    async def _reason(self, record: NotificationRecord) -> str:
        try:
            async with asyncio.timeout(_PATIENCE):
                facts, _ = await self._setup.overviews.read()
        except TimeoutError:
            return f"Not known: the overview was not read within {_PATIENCE:g} s."
        except Exception as error:  # a right is missing: the notification itself is shown all the same
            return f"Not known: {brief(self._redact(str(error)))}"
        shard = next(one for one in facts.shards if one.name == record.shard)
        head = await self._head(record, shard) if record.state == State.BLOCKED else None
        if head is None or head.id == record.id:
            return explain(record, shard)
        ended = f"It ended {head.state}: retry it, or skip it."
        own = ended if head.state in TERMINAL else f"That one: {explain(head, shard)}"
        return f"{explain(record, shard, f'`{head.id}`')} {own}"

    async def _head(self, record: NotificationRecord, shard: ShardFacts) -> NotificationRecord | None:
        """The notification for which the rest of its ordering key waits."""
        if record.ordering_key is None:
            return None
        handler = shard.handler_of(record.handler_name)
        names = [record.handler_name] if handler is None else [handler.name, *handler.aliases]
        [database] = self._shards.databases(record.shard)
        return await database.stored_notifications.first_of_key(self._namespace, names, record.ordering_key)

    async def export(
        self, filter: Filter | None = None, *, shard: str | None = None
    ) -> AsyncIterator[NotificationRecord]:
        """All notifications that match, one after the other, as :meth:`list` shows them.

        Notifications that change meanwhile may be missing or come twice.

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
        """The handler names with unfinished notifications that no process has had for some minutes or longer.

        A rename without an alias has this effect. A name that no process has had for ``subscription_ttl`` is not in the
        list: :meth:`counts` has the notifications of such a name as ``unroutable``.

        Example::

            for stranded in await outbox.admin.stranded():
                print(stranded.handler_name, stranded.unfinished, stranded.last_seen_date)
        """
        found: list[Stranded] = []
        for one in self._shards.chosen(shard):
            found += await find_stranded(one.database, self._namespace, one.clock() - self._settings.subscription_ttl)
        return found

    async def payloads(self, event_types: Sequence[str], *, shard: str | None = None) -> Sequence[str]:
        """The stored payloads of events of these types, as JSON text, in the order of their sequence.

        For programs, which need unchanged payloads: ``redact`` is not called.
        """
        names = GivenTypes(event_types).names
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
        places = await self._places(filter, after, databases, searches)
        found: dict[str, Found[NotificationRecord, Place]] = {}
        for name, place in places.items():
            search = databases[name].search
            try:
                found[name] = await search.find(self._namespace, searches[name], limit, place, documents=documents)
            except Exception as error:
                if place is not None and databases[name].refuses_value(error):
                    raise no_cursor(after) from error
                raise
        chosen = merged([each.rows for each in found.values()], limit)
        reached: dict[str, Place | None] = {}
        for name, each in found.items():
            taken = sum(record.shard == name for record in chosen)
            if taken == len(each.rows):
                if each.next is not None:
                    reached[name] = each.next
            elif not taken:
                reached[name] = places[name]
            else:
                last = each.rows[taken - 1].id
                reached[name] = await databases[name].search.place_of(self._namespace, searches[name], last)
        return Page(self._redacted(chosen), Cursor(reached).text(filter))

    async def _places(
        self, filter: Filter, after: object, databases: dict[str, Database], searches: dict[str, Search]
    ) -> dict[str, Place | None]:
        """The places after which the shards go on. A shard that was read to the end is left out."""
        if after is None:
            return dict.fromkeys(databases)
        id = _as_id(after)
        if id is None:
            cursor = cursor_of(str(after), filter, Place, is_place)
            return {name: place for name, place in cursor.places.items() if name in databases}
        if len(databases) > 1:
            raise ConfigurationError(
                f"after is the id {id}, and the list has {len(databases)} shards; give page.next, or name the shard"
            )
        [(name, database)] = databases.items()
        place = await database.search.place_of(self._namespace, searches[name], id)
        if place is None:
            raise ConfigurationError(f"after is {id}, and there is no such notification; give page.next, or a known id")
        return {name: place}

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
    """What ``outbox.admin.inspect`` has found: a list of notifications."""

    reasons: Mapping[UUID, str] = MappingProxyType({})
    """Why each unfinished notification has not run, by its id."""

    @property
    def reason(self) -> str | None:
        """Why the unfinished notifications have not run, each reason once; ``None`` if all are finished."""
        return " ".join(dict.fromkeys(self.reasons.values())) or None


def _as_id(after: object) -> UUID | None:
    """The id, or ``None`` for the text of a page. Raises :class:`ConfigurationError` for any other value."""
    if isinstance(after, UUID):
        return after
    if not isinstance(after, str):
        raise ConfigurationError(
            f"after is {briefly(after)}; expected the text in page.next, or the id of the last notification"
        )
    try:
        return UUID(after)
    except ValueError:
        return None


# --- groups of failures: equal handler and equal fingerprint --------------------------------------


def grouped(errors: Mapping[str, Sequence[LastError]], filter: Filter, redact: Redact) -> list[Group]:
    """The groups of the last errors of notifications, the largest first.

    ``errors``: by shard. ``filter``: the filter that selected the notifications.
    """
    groups: dict[tuple[str, str], list[tuple[str, LastError]]] = {}
    shown: dict[str, str] = {}  # by fingerprint: ``redact`` may be slow
    for shard, found in errors.items():
        for error in found:
            told = fingerprint(error.type, error.message)
            if told not in shown:
                # If ``redact`` changes the fingerprint, the message is not shown, and only the type counts.
                shown[told] = told if redact(told) == told else f"{error.type}: *"
            groups.setdefault((error.handler_name, shown[told]), []).append((shard, error))
    made = [_group(name, shown, members, filter, redact) for (name, shown), members in groups.items()]
    return sorted(made, key=lambda group: (-group.number, group.handler_name, group.fingerprint))


def _group(name: str, shown: str, members: Sequence[tuple[str, LastError]], filter: Filter, redact: Redact) -> Group:
    newest = max((error for _, error in members), key=lambda error: error.updated_date)
    shards = sorted({shard for shard, _ in members})
    return Group(
        handler_name=name,
        fingerprint=shown,
        number=len(members),
        first_seen=min(error.updated_date for _, error in members),
        last_seen=newest.updated_date,
        sample=redact(f"{newest.type}: {newest.message}"),
        notification_id=newest.id,
        event_id=newest.event_id,
        filter=replace(filter, handler=name, error=shown),
        shard=", ".join(shards),
    )
