"""The ``subscriptions`` table on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256

import msgspec

from outboxio.handlers.subscription import Subscription
from outboxio.model.lock_name import LockName
from outboxio.storage.mysql.connection import LoopConnection
from outboxio.storage.mysql.flavour import for_flavours
from outboxio.storage.mysql.values import as_json, as_moment
from outboxio.storage.protocols import Announced, Holder, Orders, PartitionCount, Pause
from outboxio.support.codec import decode_names

# MySQL assigns from left to right. A last_seen_date that differs from partitioned_seen_date is the work of an older
# version, which does not know partitions: older_seen_date keeps that moment.
ANNOUNCE = for_flavours("""
INSERT INTO eventlog.subscriptions
  (namespace, handler_name, event_type, topic, aliases, priority, ordered, last_seen_date,
   partitioned_seen_date)
SELECT %(namespace)s, s.handler_name, s.event_type, s.topic, s.aliases, s.priority, s.ordered, %(now)s, %(now)s
FROM JSON_TABLE(%(subscriptions)s, '$[*]' COLUMNS (handler_name {text} PATH '$[0]', event_type {text} PATH '$[1]',
  topic {text} PATH '$[2]', aliases {document} PATH '$[3]', priority INT PATH '$[4]', ordered INT PATH '$[5]')) s
ON DUPLICATE KEY UPDATE aliases = s.aliases, priority = s.priority, ordered = s.ordered,
  older_seen_date = IF(eventlog.subscriptions.last_seen_date <=> eventlog.subscriptions.partitioned_seen_date,
    eventlog.subscriptions.older_seen_date, eventlog.subscriptions.last_seen_date),
  partitioned_seen_date = GREATEST(eventlog.subscriptions.last_seen_date, %(now)s),
  last_seen_date = GREATEST(eventlog.subscriptions.last_seen_date, %(now)s)
""")

ANNOUNCED = for_flavours("""
SELECT handler_name, event_type, topic, aliases, last_seen_date FROM eventlog.subscriptions
WHERE namespace = %(namespace)s
""")

# A lease without a holder: acquired_date is the first announcement of the handler.
BEGIN = for_flavours("""
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT b.name, 0, %(owner)s, COALESCE(b.moment, UTC_TIMESTAMP(6)), 0
FROM JSON_TABLE(%(begun)s, '$[*]' COLUMNS (name {text} PATH '$[0]', moment DATETIME(6) PATH '$[1]')) b
ON DUPLICATE KEY UPDATE name = eventlog.leases.name
""")
BEGUN = for_flavours("""
SELECT l.name, l.acquired_date FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {text} PATH '$')) w
STRAIGHT_JOIN eventlog.leases l ON l.name = w.name
""")

HOLDERS = for_flavours("""
SELECT l.name, l.owner, l.acquired_date, l.released_term >= l.term
FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {text} PATH '$')) w
STRAIGHT_JOIN eventlog.leases l ON l.name = w.name WHERE l.term > 0
""")

ROUTABLE_NAMES = for_flavours("""
SELECT s.handler_name FROM eventlog.subscriptions s
WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s
UNION
SELECT a.name FROM eventlog.subscriptions r JOIN JSON_TABLE(r.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
WHERE r.namespace = %(namespace)s AND r.last_seen_date > %(seen_since)s
""")

NAMES_OF = for_flavours("""
SELECT a.name FROM eventlog.subscriptions s JOIN JSON_TABLE(s.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
""")

# MySQL assigns from left to right: paused_date reads ended_date before the change.
PAUSE = for_flavours("""
INSERT INTO eventlog.pauses (namespace, handler_name, paused_date) VALUES (%(namespace)s, %(handler_name)s, %(now)s)
ON DUPLICATE KEY UPDATE paused_date = IF(ended_date IS NULL, paused_date, %(now)s), ended_date = NULL
""")
UNPAUSE = for_flavours("""
UPDATE eventlog.pauses SET ended_date = %(now)s
WHERE namespace = %(namespace)s AND handler_name = %(handler_name)s AND ended_date IS NULL
""")
PAUSES = for_flavours("""
SELECT handler_name, ended_date, paused_date FROM eventlog.pauses WHERE namespace = %(namespace)s
""")

# A pause has no number of partitions.
ORDERS = for_flavours("""
SELECT handler_name, ended_date, NULL, NULL, NULL FROM eventlog.pauses WHERE namespace = %(namespace)s
UNION ALL
SELECT handler_name, changed_date, partitions, active, declared
FROM eventlog.handler_partitions WHERE namespace = %(namespace)s
""")

FORGET = for_flavours("""
DELETE FROM eventlog.subscriptions WHERE namespace = %(namespace)s AND handler_name = %(handler_name)s
""")


class MysqlSubscriptions:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        if not subscriptions:
            return
        # Every writer locks the rows in the order of the unique index.
        rows = sorted(subscriptions, key=_names_digest)
        listed = as_json(
            (
                s.handler_name, s.event_type, s.topic,
                msgspec.json.encode(s.aliases).decode(), s.priority, int(s.ordered),
            )
            for s in rows
        )  # fmt: skip
        await self._admin.execute(ANNOUNCE, {"namespace": namespace, "now": now, "subscriptions": listed})

    async def announced(self, namespace: str) -> list[Announced]:
        rows = await self._admin.fetch(ANNOUNCED, {"namespace": namespace})
        return [
            Announced(name, event_type, topic, decode_names(aliases), seen)
            for name, event_type, topic, aliases, seen in rows
        ]

    async def begin(self, begun: Mapping[LockName, datetime | None], owner: str) -> None:
        rows = sorted(
            ((name.lease, None if moment is None else as_moment(moment)) for name, moment in begun.items()),
            key=lambda row: row[0],
        )
        await self._admin.execute(BEGIN, {"begun": as_json(rows), "owner": owner})

    async def begun(self, names: Sequence[LockName]) -> dict[LockName, datetime]:
        by_lease = {name.lease: name for name in names}
        rows = await self._admin.fetch(BEGUN, {"names": as_json(by_lease)})
        return {by_lease[row[0]]: row[1] for row in rows}

    async def holders(self, names: Sequence[LockName]) -> dict[LockName, Holder]:
        by_lease = {name.lease: name for name in names}
        rows = await self._admin.fetch(HOLDERS, {"names": as_json(by_lease)})
        return {by_lease[lease]: Holder(owner, since, bool(given_back)) for lease, owner, since, given_back in rows}

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        rows = await self._admin.fetch(ROUTABLE_NAMES, {"namespace": namespace, "seen_since": seen_since})
        return {row[0] for row in rows}

    async def names_of(self, namespace: str, handler_name: str) -> set[str]:
        rows = await self._admin.fetch(NAMES_OF, {"namespace": namespace, "handler_name": handler_name})
        return {handler_name, *(row[0] for row in rows)}

    async def pause(self, namespace: str, handler_name: str, now: datetime) -> None:
        await self._admin.execute(PAUSE, {"namespace": namespace, "handler_name": handler_name, "now": now})

    async def unpause(self, namespace: str, handler_name: str, now: datetime) -> int:
        scope = {"namespace": namespace, "handler_name": handler_name, "now": now}
        return await self._admin.execute(UNPAUSE, scope)

    async def pauses(self, namespace: str) -> list[Pause]:
        return [Pause(*row) for row in await self._admin.fetch(PAUSES, {"namespace": namespace})]

    async def orders(self, namespace: str) -> Orders:
        rows = await self._admin.fetch(ORDERS, {"namespace": namespace})
        return Orders(
            [Pause(name, moment) for name, moment, number, *_ in rows if number is None],
            [
                PartitionCount(name, number, active, moment, declared)
                for name, moment, number, active, declared in rows
                if number is not None
            ],
        )

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._admin.execute(FORGET, {"namespace": namespace, "handler_name": handler_name})


def _names_digest(subscription: Subscription) -> tuple[bytes, ...]:
    """The parts of the column ``names_digest`` of a subscription, for the order of the unique index."""
    names = (subscription.handler_name, subscription.event_type, subscription.topic)
    return tuple(sha256(name.encode()).digest() for name in names)
