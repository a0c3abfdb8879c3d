"""The ``events`` table on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.ids import uuid7
from outboxio.storage.mysql.connection import Dedicated, execute, fetch, id_list
from outboxio.storage.mysql.flavour import Server, in_both
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import FannedOut

# Every live subscription, not only those of this process, so that an old version that fans out serves the handlers of
# a newer one. A name that is a live handler's alias gets no new rows. Of two names that are each other's alias, after a
# rename was taken back, that is the one that was seen earlier.
_SUBSCRIBED = """
WITH subscribed AS (
  SELECT s.handler_name, s.event_type, s.topic, s.priority, s.ordered FROM eventlog.subscriptions s
  WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s AND s.handler_name NOT IN (
    SELECT a.name FROM eventlog.subscriptions r JOIN JSON_TABLE(r.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
    WHERE r.namespace = %(namespace)s AND r.last_seen_date > %(seen_since)s AND NOT EXISTS (
      SELECT 1 FROM eventlog.subscriptions o
      JOIN JSON_TABLE(o.aliases, '$[*]' COLUMNS (name {text} PATH '$')) b ON b.name = r.handler_name
      WHERE o.namespace = %(namespace)s AND o.last_seen_date > %(seen_since)s AND o.handler_name = a.name
        AND (o.last_seen_date > r.last_seen_date
          OR o.last_seen_date = r.last_seen_date AND o.handler_name > r.handler_name))))
"""

# Indexes are named everywhere: with statistics from when the table was small the planner would scan it for ever.
_BY_TYPE = "eventlog.events e FORCE INDEX (events_undelivered)"
_BY_TOPIC = "eventlog.events e FORCE INDEX (events_undelivered_topic)"
_BY_ID = "eventlog.events e FORCE INDEX (PRIMARY)"

# The keys that somebody wants and that have undelivered events, and all keys that ordered handlers want: an idle poll
# is this one statement. EXISTS would be turned into a join, which a planner that believes the table to be empty begins
# with the backlog.
_TYPE_WAITS = f"""(SELECT 1 FROM {_BY_TYPE}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type = t.event_type LIMIT 1)"""
_TOPIC_WAITS = f"""(SELECT 1 FROM {_BY_TOPIC}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.topic = t.topic LIMIT 1)"""
FIND_WANTED = in_both(f"""
{_SUBSCRIBED}
SELECT JSON_ARRAY('', t.event_type, t.ordered, IF(t.ordered, COALESCE({_TYPE_WAITS}, 0), 1))
FROM (SELECT event_type, MAX(ordered) AS ordered FROM subscribed WHERE topic = '' GROUP BY event_type) t
WHERE t.ordered OR {_TYPE_WAITS} = 1
UNION ALL
SELECT JSON_ARRAY('#', t.topic, t.ordered, IF(t.ordered, COALESCE({_TOPIC_WAITS}, 0), 1))
FROM (SELECT topic, MAX(ordered) AS ordered FROM subscribed WHERE topic <> '' GROUP BY topic) t
WHERE t.ordered OR {_TOPIC_WAITS} = 1
""")

# The next ones are put together with UNION ALL, one for each key. Each walks its key by itself along the index. A batch
# is one row of one column, for the driver is slow at rows and columns. What is found by its type and by its topic is
# taken once.
#
# SKIP LOCKED never waits for a producer. But each branch sees what is committed by the time it runs: of two events of
# one ordering key, an earlier branch can miss the first, and a later one see the second. So the keys that ordered
# handlers want are read without locks, which in one statement is one view of them all. What is found by its type and is
# on a topic that ordered handlers want, or the other way round, is marked with a minus: it is not taken here.
_BATCH_OF_TYPE = f"""FROM {_BY_TYPE}
  WHERE e.namespace = %s AND e.delivered = FALSE AND e.event_type = %s ORDER BY e.sequence LIMIT %s"""
_BATCH_OF_TOPIC = f"""FROM {_BY_TOPIC}
  WHERE e.namespace = %s AND e.delivered = FALSE AND e.topic = %s ORDER BY e.sequence LIMIT %s"""
CLAIM_OF_TYPE = f"(SELECT JSON_ARRAYAGG(b.id) FROM (SELECT e.id {_BATCH_OF_TYPE} FOR UPDATE SKIP LOCKED) b)"
CLAIM_OF_TOPIC = f"(SELECT JSON_ARRAYAGG(b.id) FROM (SELECT e.id {_BATCH_OF_TOPIC} FOR UPDATE SKIP LOCKED) b)"
_MARKED = "JSON_ARRAYAGG(CONCAT(IF(b.other IN ({others}), '-', ''), b.id))"
CLAIM_OF_TYPE_MARKING = f"""
(SELECT {_MARKED} FROM (SELECT e.id, e.topic AS other {_BATCH_OF_TYPE} FOR UPDATE SKIP LOCKED) b)
"""
CLAIM_OF_TOPIC_MARKING = f"""
(SELECT {_MARKED} FROM (SELECT e.id, e.event_type AS other {_BATCH_OF_TOPIC} FOR UPDATE SKIP LOCKED) b)
"""
_NUMBERED = "JSON_ARRAYAGG(CONCAT(b.sequence, ' ', b.id))"
READ_OF_TYPE = f"(SELECT {_NUMBERED} FROM (SELECT e.id, e.sequence {_BATCH_OF_TYPE}) b)"
READ_OF_TOPIC = f"(SELECT {_NUMBERED} FROM (SELECT e.id, e.sequence {_BATCH_OF_TOPIC}) b)"

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
# What a handler had under a former name of its own is not made again.
HISTORY = in_both("""
SELECT e.id FROM eventlog.events e
WHERE e.namespace = %(namespace)s AND e.delivered = TRUE AND e.event_date >= %(since)s
  AND (%(types)s = '[]' OR e.event_type IN (
    SELECT t.event_type FROM JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {text} PATH '$')) t))
  AND EXISTS (SELECT 1 FROM eventlog.subscriptions s
    WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
      AND (s.event_type = e.event_type OR (s.topic = e.topic AND s.topic <> '')))
  AND NOT EXISTS (SELECT 1 FROM eventlog.event_notifications n WHERE n.event_id = e.id AND n.handler_name IN (
    SELECT a.name FROM eventlog.subscriptions s JOIN JSON_TABLE(s.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
    WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s))
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
    """An event type, or a topic, which has the sign ``#``, that somebody wants."""

    sign: str
    value: str
    is_ordered: int
    waits: int

    @property
    def name(self) -> str:
        """As :class:`FannedOut` calls it."""
        return f"{self.sign}{self.value}"


_key = msgspec.json.Decoder(_Key).decode
_strings = msgspec.json.Decoder(list[str]).decode


class MysqlEvents:
    def __init__(self, fanout: Dedicated, admin: Dedicated, server: Server) -> None:
        self._fanout = fanout
        self._admin = admin
        self._server = server

    async def fan_out(
        self, namespace: str, now: datetime, seen_since: datetime, rooms: Mapping[str, int], batch_size: int
    ) -> FannedOut:
        scope = {"namespace": namespace, "seen_since": seen_since, "now": now}
        wanted = await self._wanted(self._fanout, scope)
        waiting = [key for key in wanted if key.waits]
        if not waiting:  # most rounds find nothing
            return FannedOut({}, frozenset(), 0)
        share = max(1, batch_size // max(1, sum(key.name not in rooms for key in waiting)))
        ordered = [key for key in wanted if key.is_ordered]
        # One of these waits: then all are looked at, for by now others may have something that comes before it.
        looked_at = [*waiting, *(key for key in ordered if not key.waits)] if any(k.waits for k in ordered) else waiting
        sizes = {key: rooms.get(key.name, share) for key in sorted(looked_at, key=lambda key: key.sign)}

        async def claim_and_notify(connection: Any) -> FannedOut:
            claimed, full = await _claim(connection, namespace, sizes, ordered)
            made = await self._notify(connection, scope, [i for ids in claimed.values() for i in ids])
            return FannedOut(
                events={key.name: len(ids) for key, ids in claimed.items() if ids},
                full=frozenset(key.name for key in full),
                notifications=made,
            )

        done: FannedOut = await self._fanout.in_transaction(claim_and_notify)
        return done

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        wanted = await self._wanted(self._admin, {"namespace": namespace, "seen_since": seen_since})
        return any(key.waits for key in wanted)

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

    async def _wanted(self, on: Dedicated, scope: Mapping[str, Any]) -> list[_Key]:
        """The keys that wait, and those that ordered handlers want."""
        return [_key(row[0]) for row in await on.fetch(FIND_WANTED, scope)]

    async def _notify(self, connection: Any, scope: Mapping[str, Any], ids: Sequence[str]) -> int:
        """Make the notifications of claimed events, and mark these delivered; how many."""
        if not ids:
            return 0
        listed = id_list(ids)
        notify = self._server.spell(NOTIFY).replace("{ids}", listed)
        made = await execute(connection, notify, {**scope, "id_head": _id_head()})
        await execute(connection, MARK_DELIVERED.format(ids=listed))
        return made


async def _claim(
    connection: Any, namespace: str, sizes: Mapping[_Key, int], ordered: Sequence[_Key]
) -> tuple[dict[_Key, list[str]], set[_Key]]:
    """A batch of each key, as ids, and the keys that are full. An id is only the first key's that has it."""
    branches = [_branch(key, namespace, size, ordered) for key, size in sizes.items()]
    args = tuple(arg for _, some in branches for arg in some)
    rows = await fetch(connection, " UNION ALL ".join(sql for sql, _ in branches), args)
    found = {key: _strings(row[0]) if row[0] else [] for key, row in zip(sizes, rows, strict=True)}
    full = {key for key, batch in found.items() if len(batch) >= sizes[key]}

    owners: dict[str, _Key] = {}
    numbered = {key: [_numbered(text) for text in batch] for key, batch in found.items() if key.is_ordered}
    horizon = min((max(batch)[0] for key, batch in numbered.items() if key in full), default=None)
    for key, batch in numbered.items():
        taken = [event_id for sequence, event_id in batch if horizon is None or sequence <= horizon]
        for event_id in taken:
            owners.setdefault(event_id, key)
        if not taken:
            full.discard(key)
        elif len(taken) < len(batch):
            full.add(key)
    for key in (key for key in found if key not in numbered):
        for event_id in found[key]:
            if not event_id.startswith("-"):
                owners.setdefault(event_id, key)
            elif event_id[1:] not in owners:
                full.add(key)

    claimed: dict[_Key, list[str]] = {key: [] for key in sizes}
    for event_id, key in owners.items():
        claimed[key].append(event_id)
    return claimed, full


def _branch(key: _Key, namespace: str, size: int, ordered: Sequence[_Key]) -> tuple[str, list[Any]]:
    """What looks for a batch of one key, and its arguments."""
    args: list[Any] = [namespace, key.value, size]
    if key.is_ordered:
        return READ_OF_TOPIC if key.sign else READ_OF_TYPE, args
    others = [other.value for other in ordered if other.sign != key.sign]
    if not others:
        return CLAIM_OF_TOPIC if key.sign else CLAIM_OF_TYPE, args
    marking = CLAIM_OF_TOPIC_MARKING if key.sign else CLAIM_OF_TYPE_MARKING
    return marking.format(others=", ".join(["%s"] * len(others))), [*others, *args]


def _numbered(text: str) -> tuple[int, str]:
    """The sequence and the id of an event."""
    sequence, _, event_id = text.partition(" ")
    return int(sequence), event_id


def _id_head() -> str:
    """The time and the version of a UUIDv7."""
    return str(uuid7())[:15]
