"""The questions and orders of an operator: counts, lists, and changes of notifications and subscriptions by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from msgspec.structs import astuple

from outboxio.actions.nesting import refuse_claimed
from outboxio.errors import ConfigurationError
from outboxio.fanout.newcomers import refuse_skipped
from outboxio.handlers.handler import HandlerRegistry
from outboxio.model.event import EventTypes
from outboxio.model.notification import TERMINAL, NotificationRecord, State
from outboxio.model.redaction import Redact, redacted_record
from outboxio.operations.admin_shards import AdminShard, AdminShards
from outboxio.operations.known_names import Known
from outboxio.operations.orders import (
    GivenTypes,
    given_handler,
    given_id,
    given_ids,
    given_key,
    given_limit,
    given_moment,
    given_state,
    given_states,
    given_type,
)
from outboxio.operations.partitions.orders import PartitionOrders
from outboxio.operations.retention import Removed, Retention
from outboxio.operations.stranded import Stranded, find_stranded
from outboxio.operations.unroutable import count_unroutable
from outboxio.payloads.classes import AnyEvent
from outboxio.settings import Settings
from outboxio.storage.protocols import Database

_Change = Callable[[str, Sequence[UUID], datetime], Awaitable[int]]


class Admin(PartitionOrders):
    """Operations on all notifications of one namespace, on all shards unless the argument ``shard`` names a shard.

    The name of a handler stands for its aliases as well. A handler name that is neither registered here nor known to
    the namespace (by a subscription, a pause, or a notification) raises :class:`UnknownHandler` with the name that was
    probably meant. A value without a meaning raises :class:`ConfigurationError`. In both cases no row changes.
    """

    def __init__(
        self,
        namespace: str,
        shards: Mapping[str, AdminShard],
        settings: Settings,
        handlers: HandlerRegistry,
        types: EventTypes,
        redact: Redact,
        *,
        owner: object,
    ) -> None:
        super().__init__(namespace, AdminShards(shards, owner), handlers, Known(namespace, handlers, types))
        self._settings = settings
        self._redact = redact

    async def counts(self, *, shard: str | None = None) -> dict[str, int]:
        """The number of notifications in each state, with ``undelivered`` and ``unroutable``.

        ``undelivered``: events that were not fanned out yet, including events without any subscriber. ``unroutable``:
        unfinished notifications of handlers that no instance has.

        Example::

            {"PENDING": 0, ..., "SUCCEEDED": 12, "DEAD": 1, "undelivered": 3, "unroutable": 0}
        """
        counts = {**dict.fromkeys(map(str, State), 0), "undelivered": 0, "unroutable": 0}
        for one in self._shards.chosen(shard):
            for state, number in (await one.database.notifications.count_states(self._namespace)).items():
                counts[state] = counts.get(state, 0) + number
            counts["undelivered"] += await one.database.events.count_undelivered(self._namespace)
            counts["unroutable"] += await count_unroutable(one.database, self._namespace, one.clock, self._settings)
        return counts

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

    async def list(
        self,
        state: State | str | None = None,
        handler: str | None = None,
        event_type: str | None = None,
        limit: int = 100,
        *,
        shard: str | None = None,
    ) -> Sequence[NotificationRecord]:
        """The oldest notifications, narrowed down by state, handler name and event type; at most ``limit``.

        Payloads, parameters, headers and errors are shown as ``Outbox(redact=...)`` returns them.

        A document that cannot be shown, because a foreign tool has nested the document too deeply, is replaced by a
        text that says so.

        Raises :class:`ConfigurationError` for a state that does not exist, :class:`UnknownHandler` and
        :class:`UnknownEventType` for an unknown name.

        Example::

            for record in await outbox.admin.list(state="DEAD"):
                print(record.handler_name, record.event_id, record.errors[-1]["message"])
        """
        wanted = None if state is None else given_state(state)
        handler = None if handler is None else given_handler(handler)
        event_type = None if event_type is None else given_type(event_type)
        limit = given_limit(limit)
        records: list[NotificationRecord] = []
        for database in self._shards.databases(shard):
            records += await database.notifications.select(self._namespace, wanted, handler, event_type, limit)
        if not records and handler is not None:
            await self._known.refuse_unknown(handler, self._shards.databases(shard), among_rows=True)
        if not records and event_type is not None:
            await self._known.refuse_unknown_type(event_type, self._shards.databases(shard))
        return self._redacted(sorted(records, key=lambda record: record.created_date)[:limit])

    async def inspect(self, id: UUID, *, shard: str | None = None) -> Sequence[NotificationRecord]:
        """The notification with this id, or all notifications of the event with this id; empty for an unknown id.

        Example::

            (record,) = await outbox.admin.inspect(notification_id)
            print(record.state, record.attempts, record.errors)
        """
        records: list[NotificationRecord] = []
        chosen = [given_id(id)]
        for database in self._shards.databases(shard):
            records += await database.notifications.select_by_id(self._namespace, chosen)
        return self._redacted(sorted(records, key=lambda record: (record.handler_name, record.created_date)))

    async def retry(self, ids: Iterable[UUID], *, shard: str | None = None) -> int:
        """Make notifications due now, with attempts and retention from the start. Returns the number of notifications.

        A notification that parks an ordering key runs again, and the key goes on after a success.

        Raises :class:`WaitsForItself` for the notification of the transactional handler that makes the call.
        """
        return await self._change("admin.retry()", shard, lambda on: on.notifications.retry, given_ids(ids, "retry"))

    async def skip(self, ids: Iterable[UUID], *, shard: str | None = None) -> int:
        """End notifications as SKIPPED, except notifications that succeeded. Returns the number of notifications.

        Behind a notification that parks an ordering key, the key goes on.

        Raises :class:`WaitsForItself` for the notification of the transactional handler that makes the call.
        """
        return await self._change("admin.skip()", shard, lambda on: on.notifications.skip, given_ids(ids, "skip"))

    async def resume(self, handler: str, ordering_key: object, *, shard: str | None = None) -> int:
        """Let a parked key of an ordered handler go on. Returns the number of notifications that parked the key.

        The notifications that parked the key end SKIPPED. To run such notifications again instead, :meth:`retry` them.

        Example::

            for dead in await outbox.admin.list(state="DEAD", handler="ledger"):
                await outbox.admin.resume("ledger", dead.ordering_key)
        """
        handler, key = given_handler(handler), given_key(ordering_key)

        async def change(one: AdminShard) -> int:
            names = await self._known.names_of(handler, one.database)
            return await one.database.notifications.resume(self._namespace, names, key, await one.now())

        resumed = await self._shards.change("admin.resume()", shard, change)
        if not resumed:
            await self._known.refuse_unknown(handler, self._shards.databases(shard))
        return resumed

    async def replay(
        self,
        handler: str,
        since: datetime,
        until: datetime | None = None,
        types: Iterable[type[AnyEvent] | str] | None = None,
        states: Iterable[State | str] = (State.SUCCEEDED, State.EXPIRED, State.DEAD),
        *,
        shard: str | None = None,
    ) -> int:
        """Make a handler run again for events that it has finished. Returns the number of events.

        The events are those with an ``event_date`` from ``since`` until before ``until``. ``states``: the final states
        that are taken back. Purged rows cannot be replayed.

        Example::

            await outbox.admin.replay("search-index", since=datetime(2026, 1, 1), states={"SUCCEEDED"})
        """
        handler, given, wanted = given_handler(handler), GivenTypes(types), given_states(states)
        begin = given_moment(since, "since")
        end = datetime.max if until is None else given_moment(until, "until")
        unfinished = [state for state in wanted if state not in TERMINAL]
        if unfinished:
            raise ConfigurationError(
                f"replay() was given the state {unfinished[0]!r}; only ends can be taken back: {', '.join(TERMINAL)}"
            )

        async def change(one: AdminShard) -> int:
            names, now = await self._known.names_of(handler, one.database), await one.now()
            return await one.database.notifications.replay(self._namespace, names, begin, end, given.names, wanted, now)

        replayed = await self._shards.change("admin.replay()", shard, change)
        if not replayed:
            await self._known.refuse_unknown(handler, self._shards.databases(shard), among_rows=True)
            await self._known.refuse_unknown_types(given, handler, self._shards.databases(shard))
        return replayed

    async def pause(self, handler: str, *, shard: str | None = None) -> None:
        """Start no run of a handler, in any process, until :meth:`unpause`. Running handlers go on.

        The pause begins within about a second. The handler's events wait, and their retention starts when the pause
        ends.
        """
        handler = given_handler(handler)
        await self._known.refuse_unknown(handler, self._shards.databases(shard))
        for one in self._shards.to_write("admin.pause()", shard):
            await one.database.subscriptions.pause(self._namespace, handler, await one.now())
            one.wake()

    async def unpause(self, handler: str, *, shard: str | None = None) -> bool:
        """End the pause of a handler. True if the handler was paused."""
        handler, ended = given_handler(handler), 0
        for one in self._shards.to_write("admin.unpause()", shard):
            ended += await one.database.subscriptions.unpause(self._namespace, handler, await one.now())
            one.wake()
        if not ended:
            await self._known.refuse_unknown(handler, self._shards.databases(shard))
        return ended > 0

    async def paused(self, *, shard: str | None = None) -> set[str]:
        """The names of the handlers that are paused on any of the shards."""
        found: set[str] = set()
        for database in self._shards.databases(shard):
            pauses = await database.subscriptions.pauses(self._namespace)
            found |= {pause.handler_name for pause in pauses if pause.ended_date is None}
        return found

    async def purge(self, *, shard: str | None = None) -> Removed:
        """Remove old rows now, by the settings ``keep_finished``, ``keep_dead`` and ``dedup_retention``.

        ``running()`` removes the same rows little by little. An unfinished row is never removed.
        """
        removed: list[Removed] = []
        for one in self._shards.to_write("admin.purge()", shard):
            await one.measure()
            removed.append(await Retention(self._namespace, one.database, one.clock, self._settings).purge())
        return Removed(*(sum(numbers) for numbers in zip(*map(astuple, removed), strict=True)))

    async def backfill(
        self,
        handler: str,
        since: datetime,
        types: Iterable[type[AnyEvent] | str] | None = None,
        *,
        shard: str | None = None,
    ) -> int:
        """Give a handler the events since a moment that were fanned out without the handler. Returns their number.

        The moment is compared with ``event_date``. The handler's subscription must be known: run the handler once
        first. Notifications that exist already are not changed. ``types`` narrows the events down. Raises
        :class:`ConfigurationError` for events of before the handler's own ``since=``, which would end SKIPPED.

        Example::

            await outbox.admin.backfill("search-index", since=datetime(2026, 1, 1))
        """
        handler, given, begin = given_handler(handler), GivenTypes(types), given_moment(since, "since")

        async def change(one: AdminShard) -> int:
            if (known := self._handlers.find(handler)) is not None:
                await refuse_skipped(one.database, self._namespace, known, begin)
            return await one.database.events.backfill(self._namespace, handler, given.names, begin, await one.now())

        made = await self._shards.change("admin.backfill()", shard, change)
        if not made:
            await self._known.refuse_unknown(handler, self._shards.databases(shard))
            await self._known.refuse_unknown_types(given, handler, self._shards.databases(shard))
        return made

    async def unsubscribe(self, handler: str, *, shard: str | None = None) -> int:
        """Remove the subscriptions of a handler at once. Returns the number of subscriptions.

        For a handler that is gone for good. A handler that still runs announces its subscriptions again.
        """
        handler, forgotten = given_handler(handler), 0
        for one in self._shards.to_write("admin.unsubscribe()", shard):
            forgotten += await one.database.subscriptions.forget(self._namespace, handler)
        if not forgotten:
            await self._known.refuse_unknown(handler, self._shards.databases(shard))
        return forgotten

    async def payloads(self, event_types: Sequence[str], *, shard: str | None = None) -> Sequence[str]:
        """The stored payloads of events of these types, as JSON text, in the order of their sequence.

        For programs, which need unchanged payloads: ``redact`` is not called.
        """
        names = GivenTypes(event_types).names
        found: list[str] = []
        for database in self._shards.databases(shard):
            found += await database.events.payloads(self._namespace, names)
        return found

    def _redacted(self, records: Iterable[NotificationRecord]) -> Sequence[NotificationRecord]:
        return [redacted_record(record, self._redact) for record in records]

    async def _change(
        self, call: str, shard: str | None, change_of: Callable[[Database], _Change], ids: Sequence[UUID]
    ) -> int:
        refuse_claimed(call, ids)

        async def change(one: AdminShard) -> int:
            return await change_of(one.database)(self._namespace, ids, await one.now())

        return await self._shards.change(call, shard, change)
