"""Newcomers: handlers that are announced for the first time, and their start dates.

Events without a subscriber wait for their first handler, however old they are. So a new handler may receive years of
history. This is logged before it happens, and ``since=`` excludes older events (decision 24).

``since="now"`` means the time at which any process first announced the handler, also after later restarts. It is stored
in ``leases`` before the first subscription, as a lease that no process holds. A handler that was announced before its
registration had ``since=`` has no start date, and gets all events.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from outboxio.errors import ConfigurationError
from outboxio.handlers.handler import Handler, HandlerRegistry
from outboxio.handlers.options import Subscription
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import Database, Waiting
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

MAX_COUNTED = 1000
LONG_AGO = timedelta(days=1)  # older events are probably not meant for a new handler

_Known = set[tuple[str, str, str]]
_Keys = tuple[tuple[str, ...], tuple[str, ...]]


class Newcomers:
    """Finds the new handlers among the handlers that an instance is about to announce."""

    def __init__(
        self, namespace: str, database: Database, handlers: HandlerRegistry, clock: ShardClock, owner: str
    ) -> None:
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._owner = owner

    async def welcome(self) -> Mapping[str, datetime]:
        """Log the events that wait for new handlers, and return the start dates of :func:`start_dates_of`."""
        announced = await self._database.subscriptions.announced(self._namespace)
        known = {(one.handler_name, one.event_type, one.topic) for one in announced}
        start_dates = await self._start_dates(known)
        counted: dict[_Keys, Waiting] = {}  # several handlers may want the same events
        for handler in self._handlers:
            keys = _keys(one for one in self._handlers.subscriptions_of(handler) if _is_new(handler, one, known))
            if keys not in counted:
                counted[keys] = await self._waiting(keys)
            if counted[keys].number:
                _log_waiting(handler, counted[keys], start_dates.get(handler.name), self._clock())
        return start_dates

    async def _waiting(self, keys: _Keys) -> Waiting:
        types, topics = keys
        if not (types or topics):
            return Waiting(0, None)
        return await self._database.stored_events.count_waiting(
            self._namespace, types or topics, MAX_COUNTED + 1, are_topics=bool(topics)
        )

    async def _start_dates(self, known: _Known) -> Mapping[str, datetime]:
        from_now = [handler for handler in self._handlers if handler.options.since == "now"]
        if from_now:
            await self._begin(from_now, {name for name, _, _ in known})
        return await start_dates_of(self._database, self._namespace, self._handlers)

    async def _begin(self, handlers: Sequence[Handler], known_names: set[str]) -> None:
        """Store the missing start dates: a new name gets that of its alias, a new handler gets the current time.

        The current time is that of the database, because this process may not have measured that clock yet.
        """
        begun = await _begun(self._database, self._namespace, handlers)
        now = self._clock() if self._clock.is_user_supplied else None
        missing: dict[LockName, datetime | None] = {}
        for handler in handlers:
            own, first = _mark(self._namespace, handler.name), _earliest(self._namespace, handler, begun)
            if own not in begun and (first is not None or not handler.names & known_names):
                missing[own] = first or now
        if missing:
            await self._database.subscriptions.set_start_dates(missing, self._owner)


async def start_dates_of(database: Database, namespace: str, handlers: Iterable[Handler]) -> dict[str, datetime]:
    """Return the start date by handler name, only for handlers with ``since=``."""
    start_dates: dict[str, datetime] = {}
    from_now: list[Handler] = []
    for handler in handlers:
        since = handler.options.since
        if isinstance(since, datetime):
            start_dates[handler.name] = since
        elif since is not None:
            from_now.append(handler)
    if not from_now:
        return start_dates
    begun = await _begun(database, namespace, from_now)
    for handler in from_now:
        first = _earliest(namespace, handler, begun)
        if first is not None:
            start_dates[handler.name] = first
    return start_dates


async def refuse_skipped(database: Database, namespace: str, handler: Handler, since: datetime) -> None:
    """Raise :class:`ConfigurationError` if the handler has a ``since=`` later than ``since``."""
    for name, start_date in (await start_dates_of(database, namespace, [handler])).items():
        if since < start_date:
            raise ConfigurationError(
                f"handler {name!r} gets no events before {start_date} UTC because of its since=: backfill from that "
                f"time, or register the handler with since={since!r} first"
            )


async def _begun(database: Database, namespace: str, handlers: Iterable[Handler]) -> Mapping[LockName, datetime]:
    marks = [_mark(namespace, name) for h in handlers for name in sorted(h.names)]
    return await database.subscriptions.start_dates(marks)


def _earliest(namespace: str, handler: Handler, begun: Mapping[LockName, datetime]) -> datetime | None:
    return min((begun[mark] for name in handler.names if (mark := _mark(namespace, name)) in begun), default=None)


def _mark(namespace: str, handler_name: str) -> LockName:
    return LockName(namespace, "since", handler_name)


def _keys(subscriptions: Iterable[Subscription]) -> _Keys:
    """Return the event types and topics of the subscriptions."""
    listed = list(subscriptions)
    return tuple(one.event_type for one in listed if one.event_type), tuple(one.topic for one in listed if one.topic)


def _is_new(handler: Handler, subscription: Subscription, known: _Known) -> bool:
    """Return True if the handler never had this subscription, under its name or an alias."""
    return all((name, subscription.event_type, subscription.topic) not in known for name in handler.names)


def _log_waiting(handler: Handler, waiting: Waiting, start_date: datetime | None, now: datetime) -> None:
    number = f"more than {MAX_COUNTED:,}" if waiting.number > MAX_COUNTED else str(waiting.number)
    is_old = waiting.oldest is not None and now - waiting.oldest > LONG_AGO
    consequence = (
        "it will process all of them; register it with since= to skip older events"
        if start_date is None
        else f"those before {_formatted(start_date)} are skipped (SKIPPED), and it will process the others"
    )
    logger.log(
        logging.WARNING if is_old and start_date is None else logging.INFO,
        "handler %r is new, and %s existing events are waiting for it, the oldest from %s: %s",
        handler.name, number, _formatted(waiting.oldest), consequence,
        handler=handler.name, waiting=waiting.number,
    )  # fmt: skip


def _formatted(at: datetime | None) -> str:
    return "an unknown date" if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"
