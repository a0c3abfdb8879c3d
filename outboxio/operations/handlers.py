"""The orders of an operator about a handler, or about a whole shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec.structs import astuple

from outboxio.errors import ConfigurationError
from outboxio.fanout.newcomers import refuse_skipped
from outboxio.model.notification import TERMINAL, State
from outboxio.model.payloads.classes import AnyEvent
from outboxio.operations.arguments import GivenTypes, given_handler, given_key, given_moment, given_states
from outboxio.operations.base import AdminBase
from outboxio.operations.recorder import AdminShard, Order
from outboxio.operations.retention import Removed, Retention


class HandlerOrders(AdminBase):
    """A part of ``Admin``. Each method writes a row of ``operations``: ``actor`` and ``reason`` are for that row."""

    async def resume(
        self,
        handler: str,
        ordering_key: object,
        *,
        actor: str | None = None,
        reason: str | None = None,
        shard: str | None = None,
    ) -> int:
        """Let a parked key of an ordered handler go on. Returns the number of notifications that parked the key.

        The notifications that parked the key end SKIPPED. To run such notifications again instead, ``retry`` them.

        Example::

            for key in await outbox.admin.keys():
                await outbox.admin.resume(key.handler_name, key.ordering_key)
        """
        handler, key = given_handler(handler), given_key(ordering_key)
        request = {"handler": handler, "ordering_key": key}
        order = await self._checked("resume", request, actor, reason, shard, among_rows=True)

        async def change(one: AdminShard) -> int:
            names = await self._known.names_of(handler, one.database)
            return await one.database.stored_notifications.resume(self._namespace, names, key, await one.now())

        return await self._recorder.done(order, shard, change)

    async def replay(
        self,
        handler: str,
        since: datetime,
        until: datetime | None = None,
        types: Iterable[type[AnyEvent] | str] | None = None,
        states: Iterable[State | str] = (State.SUCCEEDED, State.EXPIRED, State.DEAD),
        *,
        actor: str | None = None,
        reason: str | None = None,
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
        request: dict[str, object] = {
            "handler": handler,
            "since": begin.isoformat(),
            "until": None if until is None else end.isoformat(),
            "types": list(given.names) or None,
            "states": list(wanted),
        }
        order = await self._checked("replay", request, actor, reason, shard, types=given, among_rows=True)

        async def change(one: AdminShard) -> int:
            names, now = await self._known.names_of(handler, one.database), await one.now()
            return await one.database.stored_notifications.replay(
                self._namespace, names, begin, end, given.names, wanted, now
            )

        return await self._recorder.done(order, shard, change)

    async def backfill(
        self,
        handler: str,
        since: datetime,
        types: Iterable[type[AnyEvent] | str] | None = None,
        *,
        actor: str | None = None,
        reason: str | None = None,
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
        request = {"handler": handler, "since": begin.isoformat(), "types": list(given.names) or None}
        order = await self._checked("backfill", request, actor, reason, shard, types=given)
        if (known := self._handlers.find(handler)) is not None:
            for database in self._shards.databases(shard):
                await refuse_skipped(database, self._namespace, known, begin)

        async def change(one: AdminShard) -> int:
            return await one.database.stored_events.backfill(
                self._namespace, handler, given.names, begin, await one.now()
            )

        return await self._recorder.done(order, shard, change)

    async def pause(
        self, handler: str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> None:
        """Start no run of a handler, in any process, until :meth:`unpause`. Running handlers go on.

        The pause begins within about a second. The handler's events wait, and their retention starts when the pause
        ends.

        Example::

            await outbox.admin.pause("invoice-pdf", reason="the PDF service moves")
        """
        handler = given_handler(handler)
        order = await self._checked("pause", {"handler": handler}, actor, reason, shard)

        async def change(one: AdminShard) -> int:
            await one.database.subscriptions.pause(self._namespace, handler, await one.now())
            one.wake()
            return 0

        await self._recorder.carry_out(order, shard, change)

    async def unpause(
        self, handler: str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> bool:
        """End the pause of a handler. True if the handler was paused."""
        handler, ended = given_handler(handler), 0
        order = await self._checked("unpause", {"handler": handler}, actor, reason, shard)

        async def change(one: AdminShard) -> int:
            nonlocal ended
            ended += await one.database.subscriptions.unpause(self._namespace, handler, await one.now())
            one.wake()
            return 0

        await self._recorder.carry_out(order, shard, change)
        return ended > 0

    async def paused(self, *, shard: str | None = None) -> set[str]:
        """The names of the handlers that are paused on any of the shards."""
        found: set[str] = set()
        for database in self._shards.databases(shard):
            pauses = await database.subscriptions.pauses(self._namespace)
            found |= {pause.handler_name for pause in pauses if pause.ended_date is None}
        return found

    async def purge(self, *, actor: str | None = None, reason: str | None = None, shard: str | None = None) -> Removed:
        """Remove old rows now, by the settings ``keep_finished``, ``keep_dead`` and ``dedup_retention``.

        ``running()`` removes the same rows little by little. An unfinished row is never removed.
        """
        order, removed = self._recorder.order("purge", {}, actor, reason), list[Removed]()

        async def change(one: AdminShard) -> int:
            await one.measure()
            removed.append(await Retention(self._namespace, one.database, one.clock, self._settings).purge())
            return removed[-1].notifications

        await self._recorder.carry_out(order, shard, change)
        return Removed(*(sum(numbers) for numbers in zip(*map(astuple, removed), strict=True)))

    async def unsubscribe(
        self, handler: str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> int:
        """Remove the subscriptions of a handler at once. Returns the number of subscriptions.

        For a handler that is gone for good. A handler that still runs announces its subscriptions again.
        """
        handler, forgotten = given_handler(handler), 0
        order = await self._checked("unsubscribe", {"handler": handler}, actor, reason, shard)

        async def change(one: AdminShard) -> int:
            nonlocal forgotten
            forgotten += await one.database.subscriptions.forget(self._namespace, handler)
            return 0

        await self._recorder.carry_out(order, shard, change)
        return forgotten

    async def _checked(
        self,
        kind: str,
        request: Mapping[str, object],
        actor: str | None,
        reason: str | None,
        shard: str | None,
        *,
        types: GivenTypes | None = None,
        among_rows: bool = False,
    ) -> Order:
        """An operation on a handler, before anything is written.

        Raises :class:`UnknownHandler` for an unknown handler, and :class:`UnknownEventType` for an unknown type.
        ``among_rows``: a name that only finished notifications have is known, too.
        """
        order, handler = self._recorder.order(kind, request, actor, reason), str(request["handler"])
        self._shards.to_write(order.call, shard)
        databases = self._shards.databases(shard)
        await self._known.refuse_unknown(handler, databases, among_rows=among_rows)
        if types is not None:
            await self._known.refuse_unknown_types(types, handler, databases)
        return order
