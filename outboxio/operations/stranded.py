"""Stranded notifications: their handler name was announced recently, but no process has the handler any more.

The cause is a rename without an alias, or a fleet of workers that is down while others run. Fan-out continues to insert
rows for the name until ``subscription_ttl`` has passed, and only then is the name reported as unroutable, which would
be days later.

Every process announces its handlers at least once a minute. A name has no process if it was last seen some minutes
before the most recently seen name. This rule compares no clocks, and also works when all processes are down, because
all names were then last seen at about the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from outboxio.health.facts import GONE_AFTER
from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, counts_of, slots_of
from outboxio.support.clock import Clock, ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

_MAX_NAMED = 3  # handlers of which one may be the successor


class Stranded(Struct, frozen=True, kw_only=True):
    """Unfinished notifications of a handler name that no process has. Dates are naive UTC.

    ``oldest_date``: when the oldest due notification was inserted; ``None`` if all notifications are BLOCKED.
    ``last_seen_date``: when a process last announced the handler.
    ``successors``: current handlers of the same events. One of them may be this handler under a new name.
    """

    handler_name: str
    unfinished: int
    oldest_date: datetime | None
    last_seen_date: datetime
    shard: str
    successors: tuple[str, ...] = ()

    def __str__(self) -> str:
        oldest = "" if self.oldest_date is None else f", the oldest from {self.oldest_date:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"handler {self.handler_name!r} has {self.unfinished} unfinished notifications{oldest}, and no process has "
            f"had this handler since {self.last_seen_date:%Y-%m-%d %H:%M:%S} UTC: deploy it, or {self._alias}"
        )

    @property
    def _alias(self) -> str:
        alias = f"`aliases={{{self.handler_name!r}}}`"
        if not 1 <= len(self.successors) <= _MAX_NAMED:
            return f"add {alias} to the handler that replaced it"
        named = " or ".join(map(repr, self.successors))
        return f"if {named} is its new name, add {alias} there"


async def find_stranded(database: Database, namespace: str, seen_since: datetime) -> list[Stranded]:
    """Return the stranded notifications of a namespace, by handler name; a single short query if there are none.

    Names that were not seen since ``seen_since`` are unroutable, and omitted.
    """
    gone = await _gone(database, namespace, seen_since)
    if not gone:
        return []
    unfinished = await database.stored_notifications.unfinished_names(namespace)
    return [
        await _stranded(database, namespace, name, gone[name], await _successors(database, namespace, name, gone))
        for name in unfinished
        if name in gone
    ]


async def _successors(database: Database, namespace: str, name: str, gone: Mapping[str, datetime]) -> tuple[str, ...]:
    """Return the current handlers with the same event types and topics."""
    sources = dict[str, set[tuple[str, str]]]()
    for one in await database.subscriptions.announced(namespace):
        sources.setdefault(one.handler_name, set()).add((one.event_type, one.topic))
    return tuple(sorted(other for other in sources if other not in gone and sources[other] == sources.get(name)))


async def _gone(database: Database, namespace: str, seen_since: datetime) -> dict[str, datetime]:
    """Return the names that no process has any more, each with the time when it was last seen."""
    announced = await database.subscriptions.announced(namespace)
    seen: dict[str, datetime] = {}
    for one in announced:
        for name in one.names:
            seen[name] = max(one.last_seen_date, seen.get(name, one.last_seen_date))
    newest = max(seen.values(), default=seen_since)
    return {name: last for name, last in seen.items() if seen_since < last < newest - GONE_AFTER}


async def _stranded(
    database: Database, namespace: str, name: str, last_seen: datetime, successors: tuple[str, ...]
) -> Stranded:
    return Stranded(
        handler_name=name,
        unfinished=await database.stored_notifications.count_unfinished(namespace, [name]),
        oldest_date=await database.stored_notifications.oldest_unfinished(namespace, name),
        last_seen_date=last_seen,
        shard=database.name,
        successors=successors,
    )


class StrandedWatch:
    """Logs a warning about stranded notifications, once for each name, in the process that fans out."""

    def __init__(self, namespace: str, database: Database, clock: Clock, ttl: timedelta) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._ttl = ttl
        self._started_at: datetime | None = None
        self._warned: frozenset[str] = frozenset()

    async def check(self) -> None:
        """Warn about the names that became stranded since the last call.

        Nothing is logged in the first minutes, when other processes may not have announced their handlers yet.
        """
        now = self._clock()
        self._started_at = self._started_at or now
        if now - self._started_at < GONE_AFTER:
            return
        found = await find_stranded(self._database, self._namespace, now - self._ttl)
        for stranded in found:
            if stranded.handler_name not in self._warned:
                logger.warning(
                    "stranded: %s", stranded, handler=stranded.handler_name, waiting=stranded.unfinished,
                )  # fmt: skip
        self._warned = frozenset(stranded.handler_name for stranded in found)


# --- unroutable notifications ---------------------------------------------------------------------
#
# No process has had a handler of their name for ``subscription_ttl``. Deferred rows are counted as well: no process has
# a version of the event class that can decode them.

_NO_BOUND = 2**31 - 1


async def unroutable_names(database: Database, namespace: str, seen_since: datetime) -> list[str]:
    """Return the handler names with unfinished notifications that no process has, as a name or as an alias."""
    return await _unroutable(
        database, namespace, await database.stored_notifications.unfinished_names(namespace), seen_since
    )


async def count_unroutable(database: Database, namespace: str, clock: ShardClock, settings: Settings) -> int:
    """Count the unroutable notifications. Reads the database's clock only if any notification is unfinished."""
    unfinished = await database.stored_notifications.unfinished_names(namespace)
    if not unfinished:
        return 0
    await clock.measure(database.now)
    seen_since = clock.settled() - settings.subscription_ttl
    names = await _unroutable(database, namespace, unfinished, seen_since)
    count = await database.stored_notifications.count_unfinished(namespace, names) if names else 0
    slots = slots_of(await counts_of(database, namespace), [name for name in unfinished if name not in names])
    return count + sum(one.number for one in await database.deferred.count(namespace, slots, _NO_BOUND))


async def _unroutable(database: Database, namespace: str, unfinished: Sequence[str], seen_since: datetime) -> list[str]:
    if not unfinished:
        return []
    routable = await database.subscriptions.routable_names(namespace, seen_since)
    return [name for name in unfinished if name not in routable]


class UnroutableWatch:
    """Logs a warning about unroutable notifications, once for each name, and expires them after their retention."""

    def __init__(self, namespace: str, database: Database, clock: ShardClock, settings: Settings) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._settings = settings
        self._reported: set[str] = set()

    async def run_once(self, seen_since: datetime) -> RoundResult:
        """Log new names, and expire at most a batch of notifications."""
        now = self._clock()
        names = await unroutable_names(self._database, self._namespace, seen_since)
        for name in sorted(set(names) - self._reported):
            logger.warning(
                "handler %r has unfinished notifications, but no process has this handler: deploy it, or add "
                "`aliases={%r}` to the handler that replaced it; otherwise they expire after their retention",
                name, name, handler=name,
            )  # fmt: skip
        self._reported = set(names)
        if not names:
            return NOTHING
        before = self._clock.settled() - self._settings.handling_retention_window
        size = self._settings.handling_batch_size
        done = await self._database.stored_notifications.expire(self._namespace, names, before, now, size)
        return RoundResult(done, more=done >= size)
