"""Operations on a handler or a whole shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec.structs import astuple

from outboxio.errors import ConfigurationError
from outboxio.fanout.newcomers import refuse_skipped
from outboxio.model.notification import TERMINAL, State
from outboxio.model.payloads.classes import AnyEvent
from outboxio.operations.arguments import RequestedTypes, handler_argument, key_argument, states_argument, time_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.recorder import AdminShard, OperationRequest
from outboxio.operations.retention import Removed, Retention


class HandlerOperations(AdminBase):
    """A part of ``Admin``. Each method writes a row of ``operations``, which stores ``actor`` and ``reason``."""

    async def resume(
        self,
        handler: str,
        ordering_key: object,
        *,
        actor: str | None = None,
        reason: str | None = None,
        shard: str | None = None,
    ) -> int:
        """Resume a parked key of an ordered handler. Returns the number of notifications that parked the key.

        The notifications that parked the key end as SKIPPED. To run them again instead, ``retry`` them.

        Example::

            for key in await outbox.admin.keys():
                await outbox.admin.resume(key.handler_name, key.ordering_key)
        """
        handler, key = handler_argument(handler), key_argument(ordering_key)
        request = {"handler": handler, "ordering_key": key}
        requested = await self._checked("resume", request, actor, reason, shard, among_rows=True)

        async def change(one: AdminShard) -> int:
            names = await self._known.names_of(handler, one.database)
            return await one.database.stored_notifications.resume(self._namespace, names, key, await one.now())

        return await self._recorder.done(requested, shard, change)

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
        """Run a handler again for events that it has finished. Returns the number of events.

        Selects events with an ``event_date`` from ``since`` (inclusive) to ``until`` (exclusive). ``states``: the final
        states to reset. Purged rows cannot be replayed.

        Example::

            await outbox.admin.replay("search-index", since=datetime(2026, 1, 1), states={"SUCCEEDED"})
        """
        handler, event_types, final = handler_argument(handler), RequestedTypes(types), states_argument(states)
        begin = time_argument(since, "since")
        end = datetime.max if until is None else time_argument(until, "until")
        unfinished = [state for state in final if state not in TERMINAL]
        if unfinished:
            raise ConfigurationError(
                f"replay() got the state {unfinished[0]!r}; expected only final states: {', '.join(TERMINAL)}"
            )
        request: dict[str, object] = {
            "handler": handler,
            "since": begin.isoformat(),
            "until": None if until is None else end.isoformat(),
            "types": list(event_types.names) or None,
            "states": list(final),
        }
        requested = await self._checked("replay", request, actor, reason, shard, types=event_types, among_rows=True)

        async def change(one: AdminShard) -> int:
            names, now = await self._known.names_of(handler, one.database), await one.now()
            return await one.database.stored_notifications.replay(
                self._namespace, names, begin, end, event_types.names, final, now
            )

        return await self._recorder.done(requested, shard, change)

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
        """Deliver past events to a handler that was added later. Returns the number of new notifications.

        Selects events with an ``event_date`` from ``since`` on that were fanned out without the handler, of ``types``
        or of all its types. The handler's subscription must be known: run the handler once first. Existing
        notifications are not changed. Raises :class:`ConfigurationError` if ``since`` is before the handler's own
        ``since=``, because such events would end as SKIPPED.

        Example::

            await outbox.admin.backfill("search-index", since=datetime(2026, 1, 1))
        """
        handler, event_types, begin = handler_argument(handler), RequestedTypes(types), time_argument(since, "since")
        request = {"handler": handler, "since": begin.isoformat(), "types": list(event_types.names) or None}
        requested = await self._checked("backfill", request, actor, reason, shard, types=event_types)
        if (known := self._handlers.find(handler)) is not None:
            for database in self._shards.databases(shard):
                await refuse_skipped(database, self._namespace, known, begin)

        async def change(one: AdminShard) -> int:
            return await one.database.stored_events.backfill(
                self._namespace, handler, event_types.names, begin, await one.now()
            )

        return await self._recorder.done(requested, shard, change)

    async def pause(
        self, handler: str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> None:
        """Pause a handler in all processes until :meth:`unpause`: no new run starts. Running handlers finish.

        The pause takes effect within about a second. The handler's events wait, and their retention starts when the
        pause ends.

        Example::

            await outbox.admin.pause("invoice-pdf", reason="the PDF service moves")
        """
        handler = handler_argument(handler)
        requested = await self._checked("pause", {"handler": handler}, actor, reason, shard)

        async def change(one: AdminShard) -> int:
            await one.database.subscriptions.pause(self._namespace, handler, await one.now())
            one.wake()
            return 0

        await self._recorder.carry_out(requested, shard, change)

    async def unpause(
        self, handler: str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> bool:
        """End the pause of a handler. Returns True if the handler was paused."""
        handler, ended = handler_argument(handler), 0
        requested = await self._checked("unpause", {"handler": handler}, actor, reason, shard)

        async def change(one: AdminShard) -> int:
            nonlocal ended
            ended += await one.database.subscriptions.unpause(self._namespace, handler, await one.now())
            one.wake()
            return 0

        await self._recorder.carry_out(requested, shard, change)
        return ended > 0

    async def paused(self, *, shard: str | None = None) -> set[str]:
        """Return the names of the handlers that are paused on any of the shards."""
        found: set[str] = set()
        for database in self._shards.databases(shard):
            pauses = await database.subscriptions.pauses(self._namespace)
            found |= {pause.handler_name for pause in pauses if pause.ended_date is None}
        return found

    async def purge(self, *, actor: str | None = None, reason: str | None = None, shard: str | None = None) -> Removed:
        """Remove rows past their retention now: settings ``keep_finished``, ``keep_dead`` and ``dedup_retention``.

        ``running()`` removes the same rows gradually. Unfinished rows are never removed.
        """
        requested, removed = self._recorder.request("purge", {}, actor, reason), list[Removed]()

        async def change(one: AdminShard) -> int:
            await one.measure()
            removed.append(await Retention(self._namespace, one.database, one.clock, self._settings).purge())
            return removed[-1].notifications

        await self._recorder.carry_out(requested, shard, change)
        return Removed(*(sum(numbers) for numbers in zip(*map(astuple, removed), strict=True)))

    async def unsubscribe(
        self, handler: str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> int:
        """Remove the subscriptions of a handler. Returns the number of subscriptions.

        Use this for a handler that was removed for good. A handler that is still running announces them again.
        """
        handler, removed = handler_argument(handler), 0
        requested = await self._checked("unsubscribe", {"handler": handler}, actor, reason, shard)

        async def change(one: AdminShard) -> int:
            nonlocal removed
            removed += await one.database.subscriptions.forget(self._namespace, handler)
            return 0

        await self._recorder.carry_out(requested, shard, change)
        return removed

    async def _checked(
        self,
        kind: str,
        request: Mapping[str, object],
        actor: str | None,
        reason: str | None,
        shard: str | None,
        *,
        types: RequestedTypes | None = None,
        among_rows: bool = False,
    ) -> OperationRequest:
        """Return the validated request for an operation on a handler, before anything is written.

        Raises :class:`UnknownHandler` for an unknown handler, and :class:`UnknownEventType` for an unknown type.
        ``among_rows``: accept a name that only finished notifications have.
        """
        requested, handler = self._recorder.request(kind, request, actor, reason), str(request["handler"])
        self._shards.to_write(requested.call, shard)
        databases = self._shards.databases(shard)
        await self._known.refuse_unknown(handler, databases, among_rows=among_rows)
        if types is not None:
            await self._known.refuse_unknown_types(types, handler, databases)
        return requested
