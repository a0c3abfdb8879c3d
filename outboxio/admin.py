"""What an operator asks and orders: counts, lists, and what is done by hand to notifications and subscriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct
from msgspec.structs import astuple

from outboxio.clock import ShardClock, naive_utc
from outboxio.errors import ConfigurationError
from outboxio.event import Event, type_names
from outboxio.handler import HandlerRegistry
from outboxio.notification import TERMINAL, NotificationRecord, State
from outboxio.redaction import Redact, redacted_record
from outboxio.retention import Removed, Retention
from outboxio.settings import Settings
from outboxio.storage.protocols import Database

_Change = Callable[[str, Sequence[UUID], datetime], Awaitable[int]]


class AdminShard(Struct, frozen=True):
    """What an operator reaches of one shard."""

    database: Database
    clock: ShardClock
    wake: Callable[[], None]
    """Tell the loops, here and elsewhere, that notifications became due."""


class Admin:
    """Operations on all notifications of one namespace; on all shards unless ``shard`` names one.

    A handler is meant by its name; its aliases go with it.
    """

    def __init__(
        self,
        namespace: str,
        shards: Mapping[str, AdminShard],
        settings: Settings,
        handlers: HandlerRegistry,
        redact: Redact,
    ) -> None:
        self._namespace = namespace
        self._shards = shards
        self._settings = settings
        self._handlers = handlers
        self._redact = redact

    async def counts(self, *, shard: str | None = None) -> dict[str, int]:
        """How many notifications there are in each state, beside ``undelivered`` and ``unroutable``.

        ``undelivered``: events that were not fanned out yet, those without any subscriber included. ``unroutable``:
        unfinished notifications whose handler no instance has.

        Example::

            {"PENDING": 0, ..., "SUCCEEDED": 12, "DEAD": 1, "undelivered": 3, "unroutable": 0}
        """
        counts = {**dict.fromkeys(map(str, State), 0), "undelivered": 0, "unroutable": 0}
        for one in self._chosen(shard):
            for state, number in (await one.database.notifications.count_states(self._namespace)).items():
                counts[state] = counts.get(state, 0) + number
            counts["undelivered"] += await one.database.events.count_undelivered(self._namespace)
            counts["unroutable"] += await self._unroutable(one)
        return counts

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

        Payloads, parameters, headers and errors are as ``Outbox(redact=...)`` lets them be seen.

        Raises :class:`ConfigurationError` for a state that does not exist.

        Example::

            for record in await outbox.admin.list(state="DEAD"):
                print(record.handler_name, record.event_id, record.errors[-1]["message"])
        """
        wanted = None if state is None else _state(state)
        records: list[NotificationRecord] = []
        for one in self._chosen(shard):
            records += await one.database.notifications.select(self._namespace, wanted, handler, event_type, limit)
        return self._redacted(sorted(records, key=lambda record: record.created_date)[:limit])

    async def inspect(self, id: UUID, *, shard: str | None = None) -> Sequence[NotificationRecord]:
        """The notification with this id, or all notifications of the event with this id; empty if there is none.

        Example::

            (record,) = await outbox.admin.inspect(notification_id)
            print(record.state, record.attempts, record.errors)
        """
        records: list[NotificationRecord] = []
        chosen = _ids([id])
        for one in self._chosen(shard):
            records += await one.database.notifications.select_by_id(self._namespace, chosen)
        return self._redacted(sorted(records, key=lambda record: (record.handler_name, record.created_date)))

    async def retry(self, ids: Iterable[UUID], *, shard: str | None = None) -> int:
        """Make these notifications due now, with attempts and retention from the start; how many there were.

        One that parks its ordering key runs again, and the key goes on behind it when it succeeds.
        """
        chosen = _ids(ids)
        return await self._change(shard, lambda one: one.notifications.retry, chosen)

    async def skip(self, ids: Iterable[UUID], *, shard: str | None = None) -> int:
        """End these notifications as SKIPPED, unless they succeeded; how many.

        Behind one that parks its ordering key, the key goes on.
        """
        chosen = _ids(ids)
        return await self._change(shard, lambda one: one.notifications.skip, chosen)

    async def resume(self, handler: str, ordering_key: object, *, shard: str | None = None) -> int:
        """Let a parked key of an ordered handler go on, behind the notifications that park it; how many these were.

        They end SKIPPED. To run them again instead, :meth:`retry` them.

        Example::

            for dead in await outbox.admin.list(state="DEAD", handler="ledger"):
                await outbox.admin.resume("ledger", dead.ordering_key)
        """
        resumed = 0
        for one in self._chosen(shard):
            names = await self._names(one, handler)
            done = await one.database.notifications.resume(self._namespace, names, str(ordering_key), one.clock())
            resumed += done
            if done:
                one.wake()
        return resumed

    async def replay(
        self,
        handler: str,
        since: datetime,
        until: datetime | None = None,
        types: Iterable[type[Event] | str] | None = None,
        states: Iterable[State | str] = (State.SUCCEEDED, State.EXPIRED, State.DEAD),
        *,
        shard: str | None = None,
    ) -> int:
        """Make a handler run again for what it is done with, from ``since`` until before ``until``; how many events.

        By ``event_date``. ``states``: which ends are taken back. What is purged is not found any more.

        Example::

            await outbox.admin.replay("search-index", since=datetime(2026, 1, 1), states={"SUCCEEDED"})
        """
        wanted = [_state(state) for state in states]
        unfinished = [state for state in wanted if state not in TERMINAL]
        if unfinished:
            raise ConfigurationError(
                f"replay() was given the state {unfinished[0]!r}; only ends can be taken back: {', '.join(TERMINAL)}"
            )
        replayed = 0
        for one in self._chosen(shard):
            done = await one.database.notifications.replay(
                self._namespace, await self._names(one, handler), naive_utc(since),
                datetime.max if until is None else naive_utc(until), _type_names(types), wanted, one.clock(),
            )  # fmt: skip
            replayed += done
            if done:
                one.wake()
        return replayed

    async def pause(self, handler: str, *, shard: str | None = None) -> None:
        """Start nothing more of a handler, in any process, until :meth:`unpause`. What runs goes on.

        Within about a second. Its events wait, and have their retention from the start when the pause ends.
        """
        for one in self._chosen(shard):
            await one.database.subscriptions.pause(self._namespace, handler, one.clock())
            one.wake()

    async def unpause(self, handler: str, *, shard: str | None = None) -> bool:
        """End the pause of a handler; whether it was paused."""
        ended = 0
        for one in self._chosen(shard):
            ended += await one.database.subscriptions.unpause(self._namespace, handler, one.clock())
            one.wake()
        return ended > 0

    async def paused(self, *, shard: str | None = None) -> set[str]:
        """The names of the handlers that are paused on any of these shards."""
        found: set[str] = set()
        for one in self._chosen(shard):
            pauses = await one.database.subscriptions.pauses(self._namespace)
            found |= {pause.handler_name for pause in pauses if pause.ended_date is None}
        return found

    async def purge(self, *, shard: str | None = None) -> Removed:
        """Remove now what was kept long enough, by the settings ``keep_finished``, ``keep_dead``, ``dedup_retention``.

        What ``running()`` does by and by, in all of it. In small pieces; nothing that is unfinished is ever removed.
        """
        removed = [
            await Retention(self._namespace, one.database, one.clock, self._settings).purge()
            for one in self._chosen(shard)
        ]
        return Removed(*(sum(numbers) for numbers in zip(*map(astuple, removed), strict=True)))

    async def backfill(
        self,
        handler: str,
        since: datetime,
        types: Iterable[type[Event] | str] | None = None,
        *,
        shard: str | None = None,
    ) -> int:
        """Give a handler the events since a moment (by ``event_date``) that were fanned out without it; how many.

        The handler's subscription must be known: run it once first. What it has already is left alone. ``types``
        narrows the events down.

        Example::

            await outbox.admin.backfill("search-index", since=datetime(2026, 1, 1))
        """
        names, made = _type_names(types), 0
        for one in self._chosen(shard):
            done = await one.database.events.backfill(self._namespace, handler, names, naive_utc(since), one.clock())
            made += done
            if done:
                one.wake()
        return made

    async def unsubscribe(self, handler: str, *, shard: str | None = None) -> int:
        """Forget what a handler is subscribed to, at once; how many subscriptions it had.

        For a handler that is gone for good. One that still runs announces itself again.
        """
        return sum([await one.database.subscriptions.forget(self._namespace, handler) for one in self._chosen(shard)])

    async def payloads(self, event_types: Sequence[str], *, shard: str | None = None) -> Sequence[str]:
        """The stored payloads of events of these types, as JSON text, in the order of their sequence.

        For programs, which need them as they are: ``redact`` is not asked.
        """
        found: list[str] = []
        for one in self._chosen(shard):
            found += await one.database.events.payloads(self._namespace, event_types)
        return found

    def _redacted(self, records: Iterable[NotificationRecord]) -> Sequence[NotificationRecord]:
        return [redacted_record(record, self._redact) for record in records]

    async def _change(self, shard: str | None, change: Callable[[Database], _Change], ids: Sequence[UUID]) -> int:
        changed = 0
        for one in self._chosen(shard):
            done = await change(one.database)(self._namespace, ids, one.clock())
            changed += done
            if done:
                one.wake()
        return changed

    async def _names(self, one: AdminShard, handler: str) -> Sequence[str]:
        """The name and the aliases of a handler, of ours or of another instance."""
        known = self._handlers.find(handler)
        stored = await one.database.subscriptions.names_of(self._namespace, handler)
        return sorted(stored | {handler} | (known.names if known is not None else set()))

    async def _unroutable(self, one: AdminShard) -> int:
        unfinished = await one.database.notifications.unfinished_names(self._namespace)
        if not unfinished:
            return 0
        seen_since = one.clock() - self._settings.subscription_ttl
        routable = await one.database.subscriptions.routable_names(self._namespace, seen_since)
        names = [name for name in unfinished if name not in routable]
        return await one.database.notifications.count_unfinished(self._namespace, names) if names else 0

    def _chosen(self, shard: str | None) -> Sequence[AdminShard]:
        if shard is None:
            return tuple(self._shards.values())
        if shard not in self._shards:
            raise ConfigurationError(
                f"there is no shard {shard!r}; the shards are {', '.join(map(repr, self._shards))}"
            )
        return [self._shards[shard]]


def _type_names(types: Iterable[type[Event] | str] | None) -> Sequence[str]:
    return sorted({name for t in types or () for name in ([t] if isinstance(t, str) else type_names(t))})


def _ids(ids: Iterable[object]) -> Sequence[UUID]:
    """Ids, or the texts of ids, as UUIDs; :class:`ConfigurationError` for anything else.

    They come from command lines and web pages, and on some databases they become a part of a statement.
    """
    return tuple(id if isinstance(id, UUID) else _id(id) for id in ids)


def _id(given: object) -> UUID:
    try:
        return UUID(given if isinstance(given, str) else "")
    except ValueError:
        told = f"{given!r} is no id of a notification or an event; expected a UUID"
        raise ConfigurationError(told) from None


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise ConfigurationError(f"there is no state {state!r}; the states are {', '.join(State)}") from None
