"""Stranded notifications: their handler name was announced not long ago, and no process has the handler any longer.

A rename without an alias has this effect, and so has a fleet of workers that is down while other workers run. Fan-out
goes on making rows for the name until ``subscription_ttl`` is over. Only then is the name unroutable: without this
module an operator would not hear of the rows for days.

Every process announces its handlers at least once per minute. So a name has no process if the name was seen last some
minutes before the youngest of all names. This rule compares no clocks. It is also right when all processes are down,
because then all names were seen last at about the same time.
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

_MOST_NAMED = 3  # handlers of which one may be the successor


class Stranded(Struct, frozen=True, kw_only=True):
    """Unfinished notifications of a handler name that no process has. Dates are naive UTC.

    ``oldest_date``: the moment when the first due notification was made; ``None`` if all notifications are BLOCKED.
    ``last_seen_date``: the last moment when a process had the handler.
    ``successors``: the handlers of processes for the same events. One of them may be this handler under a new name.
    """

    handler_name: str
    unfinished: int
    oldest_date: datetime | None
    last_seen_date: datetime
    shard: str
    successors: tuple[str, ...] = ()

    def __str__(self) -> str:
        oldest = "" if self.oldest_date is None else f", the oldest of {self.oldest_date:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"handler {self.handler_name!r} has {self.unfinished} unfinished notifications{oldest}, and no process has "
            f"had such a handler since {self.last_seen_date:%Y-%m-%d %H:%M:%S} UTC: deploy it, or {self._alias}"
        )

    @property
    def _alias(self) -> str:
        alias = f"`aliases={{{self.handler_name!r}}}`"
        if not 1 <= len(self.successors) <= _MOST_NAMED:
            return f"add {alias} to the handler that has replaced it"
        named = " or ".join(map(repr, self.successors))
        return f"if {named} is its new name, add {alias} there"


async def find_stranded(database: Database, namespace: str, seen_since: datetime) -> list[Stranded]:
    """The stranded notifications of a namespace, by handler name. One short query if every handler has its process.

    Names that were not seen since ``seen_since`` are unroutable, and left out.
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
    """The handlers with the same event types and topics that processes have."""
    wanted = dict[str, set[tuple[str, str]]]()
    for one in await database.subscriptions.announced(namespace):
        wanted.setdefault(one.handler_name, set()).add((one.event_type, one.topic))
    return tuple(sorted(other for other in wanted if other not in gone and wanted[other] == wanted.get(name)))


async def _gone(database: Database, namespace: str, seen_since: datetime) -> dict[str, datetime]:
    """The names that no process has any longer, each with the moment when it was seen last."""
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
    """Warns of stranded notifications in the log, once for each name. Only the process that fans out has this watch."""

    def __init__(self, namespace: str, database: Database, clock: Clock, ttl: timedelta) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._ttl = ttl
        self._begun: datetime | None = None
        self._warned: frozenset[str] = frozenset()

    async def look(self) -> None:
        """Warn of the names that became stranded since the last call.

        The first minutes have no warning: other processes may be starting, and have not announced their handlers yet.
        """
        now = self._clock()
        self._begun = self._begun or now
        if now - self._begun < GONE_AFTER:
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
# Unroutable notifications: no instance has had a handler of their name for ``subscription_ttl``.
#
# Resting rows are counted as well: no instance has had a class that can read them.

_NO_BOUND = 2**31 - 1


async def unroutable_names(database: Database, namespace: str, seen_since: datetime) -> list[str]:
    """The handler names with unfinished notifications that no instance has, as a name or as an alias."""
    return await _unroutable(
        database, namespace, await database.stored_notifications.unfinished_names(namespace), seen_since
    )


async def count_unroutable(database: Database, namespace: str, clock: ShardClock, settings: Settings) -> int:
    """The number of unroutable notifications. Asks for the database's clock only if any notification is unfinished."""
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
    """Warns of unroutable notifications, once for each name, and ends notifications after their retention."""

    def __init__(self, namespace: str, database: Database, clock: ShardClock, settings: Settings) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._settings = settings
        self._reported: set[str] = set()

    async def run_once(self, seen_since: datetime) -> RoundResult:
        """Report new names, and end at most a batch of notifications after their retention."""
        now = self._clock()
        names = await unroutable_names(self._database, self._namespace, seen_since)
        for name in sorted(set(names) - self._reported):
            logger.warning(
                "handler %r has unfinished notifications, and no instance has such a handler: deploy it, or add "
                "`aliases={%r}` to the handler that has replaced it; they expire by retention",
                name, name, handler=name,
            )  # fmt: skip
        self._reported = set(names)
        if not names:
            return NOTHING
        before = self._clock.settled() - self._settings.handling_retention_window
        size = self._settings.handling_batch_size
        done = await self._database.stored_notifications.expire(self._namespace, names, before, now, size)
        return RoundResult(done, more=done >= size)
