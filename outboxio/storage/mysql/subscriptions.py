"""The ``subscriptions`` table on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256

import msgspec

from outboxio.storage.mysql.connection import Dedicated
from outboxio.storage.mysql.flavour import in_both
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import Pause
from outboxio.subscription import Subscription

ANNOUNCE = in_both("""
INSERT INTO eventlog.subscriptions
  (namespace, handler_name, event_type, topic, aliases, priority, ordered, last_seen_date)
SELECT %(namespace)s, s.handler_name, s.event_type, s.topic, s.aliases, s.priority, s.ordered, %(now)s
FROM JSON_TABLE(%(subscriptions)s, '$[*]' COLUMNS (handler_name {text} PATH '$[0]', event_type {text} PATH '$[1]',
  topic {text} PATH '$[2]', aliases {document} PATH '$[3]', priority INT PATH '$[4]', ordered INT PATH '$[5]')) s
ON DUPLICATE KEY UPDATE aliases = s.aliases, priority = s.priority, ordered = s.ordered,
  last_seen_date = GREATEST(eventlog.subscriptions.last_seen_date, %(now)s)
""")

ROUTABLE_NAMES = in_both("""
SELECT s.handler_name FROM eventlog.subscriptions s
WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s
UNION
SELECT a.name FROM eventlog.subscriptions r JOIN JSON_TABLE(r.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
WHERE r.namespace = %(namespace)s AND r.last_seen_date > %(seen_since)s
""")

NAMES_OF = in_both("""
SELECT a.name FROM eventlog.subscriptions s JOIN JSON_TABLE(s.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
""")

# From left to right: paused_date looks at the end that there was.
PAUSE = in_both("""
INSERT INTO eventlog.pauses (namespace, handler_name, paused_date) VALUES (%(namespace)s, %(handler_name)s, %(now)s)
ON DUPLICATE KEY UPDATE paused_date = IF(ended_date IS NULL, paused_date, %(now)s), ended_date = NULL
""")
UNPAUSE = in_both("""
UPDATE eventlog.pauses SET ended_date = %(now)s
WHERE namespace = %(namespace)s AND handler_name = %(handler_name)s AND ended_date IS NULL
""")
PAUSES = in_both("SELECT handler_name, ended_date FROM eventlog.pauses WHERE namespace = %(namespace)s")

FORGET = in_both("""
DELETE FROM eventlog.subscriptions WHERE namespace = %(namespace)s AND handler_name = %(handler_name)s
""")


class MysqlSubscriptions:
    def __init__(self, admin: Dedicated) -> None:
        self._admin = admin

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        if not subscriptions:
            return
        # Every writer locks them in the order of the unique index.
        rows = sorted(subscriptions, key=_names_digest)
        listed = as_json(
            (
                s.handler_name, s.event_type, s.topic,
                msgspec.json.encode(s.aliases).decode(), s.priority, int(s.ordered),
            )
            for s in rows
        )  # fmt: skip
        await self._admin.execute(ANNOUNCE, {"namespace": namespace, "now": now, "subscriptions": listed})

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

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._admin.execute(FORGET, {"namespace": namespace, "handler_name": handler_name})


def _names_digest(subscription: Subscription) -> tuple[bytes, ...]:
    """``names_digest`` of a namespace's subscription, as the tables make it."""
    names = (subscription.handler_name, subscription.event_type, subscription.topic)
    return tuple(sha256(name.encode()).digest() for name in names)
