"""Newcomers: handlers that are announced for the first time, and the moments since which events are for them.

Events without any subscriber wait for their first handler, however old the events are. So a new handler may be given
years of history. The log says so before that happens, and ``since=`` keeps the history from the handler (decision 24).

``since="now"`` means the moment of the handler's first announcement, by whichever process, and for all later starts.
The moment is written in ``leases`` before the first subscription, as a lease that no process holds. A handler that was
announced before its registration had ``since=`` has no such moment, and is given all events.
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

MOST_COUNTED = 1000
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
        """Log the events that wait for new handlers. Returns the moments of :func:`beginnings_of`."""
        announced = await self._database.subscriptions.announced(self._namespace)
        known = {(one.handler_name, one.event_type, one.topic) for one in announced}
        beginnings = await self._beginnings(known)
        counted: dict[_Keys, Waiting] = {}  # several handlers may want the same events
        for handler in self._handlers:
            keys = _keys(one for one in self._handlers.wanted_by(handler) if _is_new(handler, one, known))
            if keys not in counted:
                counted[keys] = await self._waiting(keys)
            if counted[keys].number:
                _tell(handler, counted[keys], beginnings.get(handler.name), self._clock())
        return beginnings

    async def _waiting(self, keys: _Keys) -> Waiting:
        types, topics = keys
        if not (types or topics):
            return Waiting(0, None)
        return await self._database.stored_events.count_waiting(
            self._namespace, types or topics, MOST_COUNTED + 1, are_topics=bool(topics)
        )

    async def _beginnings(self, known: _Known) -> Mapping[str, datetime]:
        from_now = [handler for handler in self._handlers if handler.options.since == "now"]
        if from_now:
            await self._begin(from_now, {name for name, _, _ in known})
        return await beginnings_of(self._database, self._namespace, self._handlers)

    async def _begin(self, handlers: Sequence[Handler], known_names: set[str]) -> None:
        """Write the missing moments: a new name gets the moment of its alias, a new handler gets the present moment.

        The database's clock gives the present moment, because this process may not have measured that clock yet.
        """
        begun = await _begun(self._database, self._namespace, handlers)
        now = self._clock() if self._clock.is_given else None
        lacking: dict[LockName, datetime | None] = {}
        for handler in handlers:
            own, first = _mark(self._namespace, handler.name), _earliest(self._namespace, handler, begun)
            if own not in begun and (first is not None or not handler.names & known_names):
                lacking[own] = first or now
        if lacking:
            await self._database.subscriptions.begin(lacking, self._owner)


async def beginnings_of(database: Database, namespace: str, handlers: Iterable[Handler]) -> dict[str, datetime]:
    """By handler name, the moment since which events are for the handler. Only for handlers with ``since=``."""
    beginnings: dict[str, datetime] = {}
    from_now: list[Handler] = []
    for handler in handlers:
        since = handler.options.since
        if isinstance(since, datetime):
            beginnings[handler.name] = since
        elif since is not None:
            from_now.append(handler)
    if not from_now:
        return beginnings
    begun = await _begun(database, namespace, from_now)
    for handler in from_now:
        first = _earliest(namespace, handler, begun)
        if first is not None:
            beginnings[handler.name] = first
    return beginnings


async def refuse_skipped(database: Database, namespace: str, handler: Handler, since: datetime) -> None:
    """Raise :class:`ConfigurationError` if the handler has a ``since=``, and its moment is later than ``since``."""
    for name, beginning in (await beginnings_of(database, namespace, [handler])).items():
        if since < beginning:
            raise ConfigurationError(
                f"handler {name!r} is given no events of before {beginning} UTC, by its since=: backfill from then "
                f"on, or register the handler with since={since!r} first"
            )


async def _begun(database: Database, namespace: str, handlers: Iterable[Handler]) -> Mapping[LockName, datetime]:
    return await database.subscriptions.begun([_mark(namespace, name) for h in handlers for name in sorted(h.names)])


def _earliest(namespace: str, handler: Handler, begun: Mapping[LockName, datetime]) -> datetime | None:
    return min((begun[mark] for name in handler.names if (mark := _mark(namespace, name)) in begun), default=None)


def _mark(namespace: str, handler_name: str) -> LockName:
    return LockName(namespace, "since", handler_name)


def _keys(wanted: Iterable[Subscription]) -> _Keys:
    """The event types, or the topic, that a handler wants."""
    listed = list(wanted)
    return tuple(one.event_type for one in listed if one.event_type), tuple(one.topic for one in listed if one.topic)


def _is_new(handler: Handler, wanted: Subscription, known: _Known) -> bool:
    """True if the handler never had this subscription, under its name or an alias."""
    return all((name, wanted.event_type, wanted.topic) not in known for name in handler.names)


def _tell(handler: Handler, waiting: Waiting, beginning: datetime | None, now: datetime) -> None:
    number = f"more than {MOST_COUNTED:,}" if waiting.number > MOST_COUNTED else str(waiting.number)
    is_old = waiting.oldest is not None and now - waiting.oldest > LONG_AGO
    consequence = (
        "they are given to it now; with since= in its registration, a handler is given newer ones only"
        if beginning is None
        else f"those of before {_told(beginning)} end SKIPPED, the others are given to it"
    )
    logger.log(
        logging.WARNING if is_old and beginning is None else logging.INFO,
        "handler %r is new to %s events that wait to be handled, the oldest of %s: %s",
        handler.name, number, _told(waiting.oldest), consequence,
        handler=handler.name, waiting=waiting.number,
    )  # fmt: skip


def _told(moment: datetime | None) -> str:
    return "an unknown date" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"
