"""The ``subscriptions`` table on SQLite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from outboxio.handlers.subscription import Subscription
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import Announced, Holder, Orders, Pause
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.support.clock import utc_now

ANNOUNCE = """
INSERT INTO eventlog_subscriptions (namespace, handler_name, event_type, topic, aliases, priority, ordered,
  last_seen_date)
SELECT :namespace, json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
  json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]'), :now
FROM json_each(:subscriptions) WHERE TRUE
ON CONFLICT (namespace, handler_name, event_type, topic) DO UPDATE SET aliases = excluded.aliases,
  priority = excluded.priority, ordered = excluded.ordered,
  last_seen_date = max(last_seen_date, excluded.last_seen_date)
"""

ANNOUNCED = """
SELECT json_group_array(json_array(handler_name, event_type, topic, json(aliases), last_seen_date))
FROM eventlog_subscriptions WHERE namespace = :namespace
"""

# A lease without a holder: the date is the first announcement of the handler.
BEGIN = """
INSERT INTO eventlog_leases (name, term, owner, acquired_date, released_term)
SELECT json_extract(value, '$[0]'), 0, :owner, json_extract(value, '$[1]'), 0 FROM json_each(:begun) WHERE TRUE
ON CONFLICT (name) DO NOTHING
"""
BEGUN = """
SELECT json_group_object(name, acquired_date) FROM eventlog_leases WHERE name IN (SELECT value FROM json_each(:names))
"""

HOLDERS = """
SELECT json_group_object(name, json_array(owner, acquired_date, json(iif(released_term >= term, 'true', 'false'))))
FROM eventlog_leases WHERE name IN (SELECT value FROM json_each(:names)) AND term > 0
"""

ROUTABLE_NAMES = """
SELECT json_group_array(name) FROM (
  SELECT handler_name AS name FROM eventlog_subscriptions WHERE namespace = :namespace AND last_seen_date > :seen_since
  UNION
  SELECT a.value FROM eventlog_subscriptions s, json_each(s.aliases) a
  WHERE s.namespace = :namespace AND s.last_seen_date > :seen_since)
"""

NAMES_OF = """
SELECT json_group_array(DISTINCT a.value) FROM eventlog_subscriptions s, json_each(s.aliases) a
WHERE s.namespace = :namespace AND s.handler_name = :handler_name
"""

# A paused handler keeps the date of the first pause.
PAUSE = """
INSERT INTO eventlog_pauses (namespace, handler_name, paused_date) VALUES (:namespace, :handler_name, :now)
ON CONFLICT (namespace, handler_name) DO UPDATE SET paused_date = excluded.paused_date, ended_date = NULL
WHERE ended_date IS NOT NULL
"""
UNPAUSE = """
UPDATE eventlog_pauses SET ended_date = :now
WHERE namespace = :namespace AND handler_name = :handler_name AND ended_date IS NULL
"""
PAUSES = """
SELECT json_group_array(json_array(handler_name, ended_date, paused_date)) FROM eventlog_pauses
WHERE namespace = :namespace
"""

FORGET = "DELETE FROM eventlog_subscriptions WHERE namespace = :namespace AND handler_name = :handler_name"


class SqliteSubscriptions:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        rows = as_json((s.handler_name, s.event_type, s.topic, s.aliases, s.priority, s.ordered) for s in subscriptions)
        if subscriptions:
            await self._connections.write(
                ANNOUNCE, {"namespace": namespace, "now": as_text(now), "subscriptions": rows}
            )

    async def announced(self, namespace: str) -> list[Announced]:
        rows = await self._connections.inspect(ANNOUNCED, {"namespace": namespace})
        found = msgspec.json.decode(rows, type=list[tuple[str, str, str, tuple[str, ...], datetime]])
        return [Announced(*row) for row in found]

    async def begin(self, begun: Mapping[LockName, datetime | None], owner: str) -> None:
        rows = as_json((name.lease, as_text(moment or utc_now())) for name, moment in begun.items())
        await self._connections.write(BEGIN, {"begun": rows, "owner": owner})

    async def begun(self, names: Sequence[LockName]) -> dict[LockName, datetime]:
        by_lease = {name.lease: name for name in names}
        found = await self._connections.inspect(BEGUN, {"names": as_json(by_lease)})
        return {by_lease[lease]: date for lease, date in msgspec.json.decode(found, type=dict[str, datetime]).items()}

    async def holders(self, names: Sequence[LockName]) -> dict[LockName, Holder]:
        by_lease = {name.lease: name for name in names}
        found = await self._connections.inspect(HOLDERS, {"names": as_json(by_lease)})
        rows = msgspec.json.decode(found, type=dict[str, tuple[str, datetime, bool]])
        return {by_lease[lease]: Holder(*row) for lease, row in rows.items()}

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        names = await self._connections.inspect(
            ROUTABLE_NAMES, {"namespace": namespace, "seen_since": as_text(seen_since)}
        )
        return set(msgspec.json.decode(names, type=list[str]))

    async def names_of(self, namespace: str, handler_name: str) -> set[str]:
        scope = {"namespace": namespace, "handler_name": handler_name}
        aliases = msgspec.json.decode(await self._connections.inspect(NAMES_OF, scope), type=set[str])
        return {handler_name} | aliases

    async def pause(self, namespace: str, handler_name: str, now: datetime) -> None:
        await self._connections.write(PAUSE, _pause(namespace, handler_name, now))

    async def unpause(self, namespace: str, handler_name: str, now: datetime) -> int:
        return await self._connections.write(UNPAUSE, _pause(namespace, handler_name, now))

    async def pauses(self, namespace: str) -> list[Pause]:
        found = await self._connections.inspect(PAUSES, {"namespace": namespace})
        rows = msgspec.json.decode(found, type=list[tuple[str, datetime | None, datetime]])
        return [Pause(*row) for row in rows]

    async def orders(self, namespace: str) -> Orders:
        return Orders(await self.pauses(namespace))

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._connections.write(FORGET, {"namespace": namespace, "handler_name": handler_name})


def _pause(namespace: str, handler_name: str, now: datetime) -> dict[str, str]:
    return {"namespace": namespace, "handler_name": handler_name, "now": as_text(now)}
