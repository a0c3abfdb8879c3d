"""The ``events`` table on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.ids import uuid7
from outboxio.storage.mysql.connection import Dedicated, execute, fetch, id_list
from outboxio.storage.mysql.flavour import Server, in_both
from outboxio.storage.protocols import FannedOut

# Every live subscription, not only those of this process, so that an old version that fans out serves the handlers of
# a newer one. A name that is a live handler's alias gets no new rows.
_SUBSCRIBED = """
WITH subscribed AS (
  SELECT s.handler_name, s.event_type, s.topic, s.priority, s.ordered FROM eventlog.subscriptions s
  WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s AND s.handler_name NOT IN (
    SELECT a.name FROM eventlog.subscriptions r JOIN JSON_TABLE(r.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
    WHERE r.namespace = %(namespace)s AND r.last_seen_date > %(seen_since)s))
"""

# Indexes are named everywhere: with statistics from when the table was small the planner would scan it for ever.
_BY_TYPE = "eventlog.events e FORCE INDEX (events_undelivered)"
_BY_TOPIC = "eventlog.events e FORCE INDEX (events_undelivered_topic)"
_BY_ID = "eventlog.events e FORCE INDEX (PRIMARY)"

# The keys that somebody wants and that have undelivered events: an idle poll is this one statement. EXISTS would be
# turned into a join, which a planner that believes the table to be empty begins with the backlog.
FIND_WAITING = in_both(f"""
{_SUBSCRIBED}
SELECT JSON_ARRAY('', t.event_type) FROM (SELECT DISTINCT event_type FROM subscribed WHERE topic = '') t
WHERE (SELECT 1 FROM {_BY_TYPE}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type = t.event_type LIMIT 1) = 1
UNION ALL
SELECT JSON_ARRAY('#', t.topic) FROM (SELECT DISTINCT topic FROM subscribed WHERE topic <> '') t
WHERE (SELECT 1 FROM {_BY_TOPIC}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.topic = t.topic LIMIT 1) = 1
""")

# The next two are put together with UNION ALL, one for each key. Each walks its key by itself along the index, and SKIP
# LOCKED never waits for a producer. A batch is one row of one column, for the driver is slow at rows and columns. What
# is found by its type and by its topic is taken once.
CLAIM_OF_TYPE = f"""
(SELECT JSON_ARRAYAGG(b.id) FROM (SELECT e.id FROM {_BY_TYPE}
  WHERE e.namespace = %s AND e.delivered = FALSE AND e.event_type = %s
  ORDER BY e.sequence LIMIT %s FOR UPDATE SKIP LOCKED) b)
"""
CLAIM_OF_TOPIC = f"""
(SELECT JSON_ARRAYAGG(b.id) FROM (SELECT e.id FROM {_BY_TOPIC}
  WHERE e.namespace = %s AND e.delivered = FALSE AND e.topic = %s
  ORDER BY e.sequence LIMIT %s FOR UPDATE SKIP LOCKED) b)
"""

_INTO = """
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name,
  action_params, started_date, completion_date, model_id, model_type, event_type, payload, event_date, state,
  attempts, next_retry_at, created_date, updated_date, sequence, ordering_key, priority, correlation_id,
  causation_id, headers, hops, retention_from)
"""

# The payloads stay inside the database. An id is a UUIDv7 with the time of its batch and the event's sequence, so that
# rows are appended to the clustered index in its order.
_OWED = """
SELECT LOWER(CONCAT(%(id_head)s, LPAD(HEX((e.sequence >> 12) & 4095), 3, '0'), '-8',
    LPAD(HEX(e.sequence & 4095), 3, '0'), '-', LEFT(SHA2(CONCAT(e.id, s.handler_name), 256), 12))),
  e.id, s.handler_name, e.namespace, e.action_id, e.action_name, e.action_params, e.started_date, e.completion_date,
  e.model_id, e.model_type, e.event_type, e.payload, e.event_date, 'PENDING', 0,
  GREATEST(COALESCE(e.available_at, %(now)s), %(now)s), %(now)s, %(now)s, e.sequence,
  CASE WHEN s.ordered THEN COALESCE(e.ordering_key, e.model_id) END, s.priority, e.correlation_id, e.causation_id,
  e.headers, e.hops, GREATEST(COALESCE(e.available_at, %(now)s), %(now)s)
"""
_ONCE = "ON DUPLICATE KEY UPDATE id = eventlog.event_notifications.id"

# A handler that is reached both ways still gets one row. Without topics the second half reads nothing.
NOTIFY = in_both(f"""
{_INTO}
{_SUBSCRIBED}
{_OWED}
FROM {_BY_ID} STRAIGHT_JOIN subscribed s ON s.event_type = e.event_type AND s.topic = ''
WHERE e.id IN ({{ids}})
UNION ALL
{_OWED}
FROM (SELECT * FROM subscribed WHERE topic <> '') s STRAIGHT_JOIN {_BY_ID} ON e.topic = s.topic
WHERE e.id IN ({{ids}})
{_ONCE}
""")

MARK_DELIVERED = f"UPDATE {_BY_ID} SET e.delivered = TRUE WHERE e.id IN ({{ids}})"

COUNT_UNDELIVERED = in_both(f"""
SELECT COUNT(*) FROM {_BY_TYPE} WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type IS NOT NULL
""")

PAYLOADS = in_both("""
SELECT e.sequence, e.payload FROM eventlog.events e
JOIN JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {text} PATH '$')) t ON t.event_type = e.event_type
WHERE e.namespace = %(namespace)s
""")

# History can be long, and one statement that wrote it all would be one transaction: it is read, and written in pieces.
HISTORY = in_both("""
SELECT e.id FROM eventlog.events e
WHERE e.namespace = %(namespace)s AND e.delivered = TRUE AND e.event_date >= %(since)s
  AND (%(types)s = '[]' OR e.event_type IN (
    SELECT t.event_type FROM JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {text} PATH '$')) t))
  AND EXISTS (SELECT 1 FROM eventlog.subscriptions s
    WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
      AND (s.event_type = e.event_type OR (s.topic = e.topic AND s.topic <> '')))
ORDER BY e.sequence
""")
PIECE = 1000
BACKFILL = f"""
{_INTO}
{_OWED}
FROM {_BY_ID} JOIN eventlog.subscriptions s ON s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
  AND (s.event_type = e.event_type OR (s.topic = e.topic AND s.topic <> ''))
WHERE e.id IN ({{ids}})
{_ONCE}
"""


class _Key(Struct, frozen=True, array_like=True):
    """An event type, or a topic, which has the sign ``#``."""

    sign: str
    value: str

    @property
    def name(self) -> str:
        """As :class:`FannedOut` calls it."""
        return f"{self.sign}{self.value}"


_key = msgspec.json.Decoder(_Key).decode
_ids = msgspec.json.Decoder(list[str]).decode


class MysqlEvents:
    def __init__(self, fanout: Dedicated, admin: Dedicated, server: Server) -> None:
        self._fanout = fanout
        self._admin = admin
        self._server = server

    async def fan_out(
        self, namespace: str, now: datetime, seen_since: datetime, rooms: Mapping[str, int], batch_size: int
    ) -> FannedOut:
        scope = {"namespace": namespace, "seen_since": seen_since, "now": now}
        waiting = await self._waiting(self._fanout, scope)
        if not waiting:  # most rounds find nothing
            return FannedOut({}, frozenset(), 0)
        share = max(1, batch_size // max(1, sum(key.name not in rooms for key in waiting)))
        sizes = {key: rooms.get(key.name, share) for key in waiting}

        async def claim_and_notify(connection: Any) -> FannedOut:
            claimed = await _claim(connection, scope, sizes)
            made = await self._notify(connection, scope, [i for ids in claimed.values() for i in ids])
            return FannedOut(
                events={key.name: len(ids) for key, ids in claimed.items() if ids},
                full=frozenset(key.name for key, ids in claimed.items() if len(ids) >= sizes[key]),
                notifications=made,
            )

        done: FannedOut = await self._fanout.in_transaction(claim_and_notify)
        return done

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        return bool(await self._waiting(self._admin, {"namespace": namespace, "seen_since": seen_since}))

    async def count_undelivered(self, namespace: str) -> int:
        return int((await self._admin.fetch(COUNT_UNDELIVERED, {"namespace": namespace}))[0][0])

    async def payloads(self, namespace: str, types: Sequence[str]) -> list[str]:
        rows = await self._admin.fetch(PAYLOADS, {"namespace": namespace, "types": as_json(types)})
        return [payload for _, payload in sorted(rows)]  # MySQL has no room to sort large documents

    async def backfill(
        self, namespace: str, handler_name: str, types: Sequence[str], since: datetime, now: datetime
    ) -> int:
        scope = {"namespace": namespace, "handler_name": handler_name}
        rows = await self._admin.fetch(HISTORY, {**scope, "types": as_json(types), "since": since})
        history = [row[0] for row in rows]
        owed = {**scope, "now": now, "id_head": _id_head()}

        async def write(connection: Any) -> int:
            made = 0
            for start in range(0, len(history), PIECE):
                piece = BACKFILL.format(ids=id_list(history[start : start + PIECE]))
                made += await execute(connection, piece, owed)
            return made

        return int(await self._admin.use(write))

    async def _waiting(self, on: Dedicated, scope: Mapping[str, Any]) -> list[_Key]:
        return [_key(row[0]) for row in await on.fetch(FIND_WAITING, scope)]

    async def _notify(self, connection: Any, scope: Mapping[str, Any], ids: Sequence[str]) -> int:
        """Make the notifications of claimed events, and mark these delivered; how many."""
        if not ids:
            return 0
        listed = id_list(ids)
        notify = self._server.spell(NOTIFY).replace("{ids}", listed)
        made = await execute(connection, notify, {**scope, "id_head": _id_head()})
        await execute(connection, MARK_DELIVERED.format(ids=listed))
        return made


async def _claim(connection: Any, scope: Mapping[str, Any], sizes: Mapping[_Key, int]) -> dict[_Key, list[str]]:
    """Lock a batch of each key; the ids by key. Types come first, and an id is the first key's that has it."""
    sql = [CLAIM_OF_TOPIC if key.sign else CLAIM_OF_TYPE for key in sizes]
    args = [value for key, size in sizes.items() for value in (scope["namespace"], key.value, size)]
    rows = await fetch(connection, " UNION ALL ".join(sql), tuple(args))
    owners: dict[str, _Key] = {}
    for key, (found,) in zip(sizes, rows, strict=True):
        for event_id in _ids(found) if found else ():
            owners.setdefault(event_id, key)
    claimed: dict[_Key, list[str]] = {key: [] for key in sizes}
    for event_id, key in owners.items():
        claimed[key].append(event_id)
    return claimed


def as_json(values: Iterable[Any]) -> str:
    """A list as the one text that JSON_TABLE takes apart again."""
    return msgspec.json.encode(list(values)).decode()


def _id_head() -> str:
    """The time and the version of a UUIDv7."""
    return str(uuid7())[:15]
