"""The ``events`` table on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import asyncpg

from outboxio.event import EventRecord
from outboxio.handover import Handover
from outboxio.ids import uuid7
from outboxio.notification import Notification
from outboxio.storage.postgres.connection import Dedicated, as_texts
from outboxio.storage.postgres.notifications import DUE_COLUMNS
from outboxio.storage.protocols import FannedOut

_INTO = """
INSERT INTO eventlog.event_notifications AS n (id, event_id, handler_name, namespace, action_id, action_name,
  action_params, started_date, completion_date, model_id, model_type, event_type, payload, event_date, state,
  attempts, next_retry_at, created_date, updated_date, sequence, ordering_key, priority, correlation_id,
  causation_id, headers, hops, retention_from)
""".strip()

# An id is a UUIDv7 with the time of its batch, 20 bits of the event's sequence and 42 random ones: rows are appended to
# the index of ids, and those that are settled together lie together. The number is negative for the variant's sake.
# gen_random_uuid(), with the time put into its text, took 1.9 us instead of 0.5.
_OWED = """
SELECT ({id_head} || to_hex(((-2)::bigint << 62) + ((e.sequence & 1048575) << 42)
    + floor(random() * 4398046511104)::bigint))::uuid, e.id, s.handler_name, e.namespace,
  e.action_id, e.action_name, e.action_params, e.started_date, e.completion_date, e.model_id, e.model_type,
  e.event_type, e.payload, e.event_date, 'PENDING', 0, greatest(e.available_at, {now}), {now}, {now}, e.sequence,
  CASE WHEN s.ordered THEN coalesce(e.ordering_key, e.model_id) END, s.priority, e.correlation_id, e.causation_id,
  e.headers, e.hops, greatest(e.available_at, {now})
""".strip()

# One statement, one snapshot: it joins every live subscription, not only those of this process, so an old version
# that runs it serves the handlers of a newer one. The lateral scan walks each type by itself along its index, and
# SKIP LOCKED never waits for a producer. An event on a topic whose type is subscribed as well is taken through its
# type, so that no event is taken twice.
#
# A name that is a live handler's alias gets no new rows. Of two names that are each other's alias, after a rename was
# taken back, that is the one that was seen earlier.
#
# What ordered handlers want is taken up to a horizon, the last event of a key that filled its room: the events of such
# a key that come next are not known. Any type may be on a topic that an ordered handler wants. Where nothing is
# ordered, the horizon is never worked out.
_TAKEN = "(NOT e.ordered OR e.sequence <= coalesce((SELECT sequence FROM horizon), e.sequence))"
_RENAMED = """
SELECT a.name FROM live l CROSS JOIN LATERAL jsonb_array_elements_text(l.aliases) AS a(name)
WHERE l.aliases <> '[]' AND NOT EXISTS (
  SELECT FROM live o WHERE o.handler_name = a.name AND o.aliases @> to_jsonb(l.handler_name::text)
    AND (o.last_seen_date, o.handler_name) > (l.last_seen_date, l.handler_name))
"""
# Below what was reached lie events that are delivered, whose entries in the index stay for as long as any transaction
# may still want them: a backlog is read on from there.
_AFTER = "CASE WHEN t.ordered OR rooms.after IS NULL THEN (-2)::bigint << 62 ELSE rooms.after END AS after"
# The commit does not wait for the disk: if the server fails before the next one that does, its events are undelivered
# again, and fanned out again. Outcomes wait, and with them all that was written before.
_FAN_OUT = f"""
WITH live AS MATERIALIZED (
  SELECT handler_name, event_type, topic, aliases, priority, ordered, last_seen_date
  FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $3
), renamed AS MATERIALIZED (
  {_RENAMED}
), subscribed AS MATERIALIZED (
  SELECT * FROM live WHERE handler_name NOT IN (SELECT name FROM renamed)
), rooms AS MATERIALIZED (
  SELECT * FROM unnest($4::text[], $5::text[]::bigint[], $8::text[]::bigint[]) AS room(key, size, after)
), types AS MATERIALIZED (
  SELECT t.event_type, coalesce(rooms.size, greatest(1, $6::bigint / count(*) OVER ())) AS size, t.ordered, {_AFTER}
  FROM (SELECT event_type, bool_or(ordered) OR (SELECT coalesce(bool_or(ordered), FALSE) FROM subscribed
          WHERE topic <> '') AS ordered
        FROM subscribed WHERE topic = '' GROUP BY event_type) t
    LEFT JOIN rooms ON rooms.key = t.event_type
), topics AS MATERIALIZED (
  SELECT t.topic, coalesce(rooms.size, greatest(1, $6::bigint / count(*) OVER ())) AS size, t.ordered, {_AFTER}
  FROM (SELECT topic, bool_or(ordered) AS ordered FROM subscribed WHERE topic <> '' GROUP BY topic) t
    LEFT JOIN rooms ON rooms.key = '#' || t.topic
), batch AS MATERIALIZED (
  SELECT e.*, e.event_type AS key, types.size, types.ordered FROM types CROSS JOIN LATERAL (
    SELECT ctid AS place, * FROM eventlog.events
    WHERE namespace = $1 AND event_type = types.event_type AND delivered = FALSE AND sequence > types.after
    ORDER BY sequence LIMIT types.size FOR UPDATE SKIP LOCKED) e
  UNION ALL
  SELECT e.*, '#' || e.topic AS key, topics.size, topics.ordered FROM topics CROSS JOIN LATERAL (
    SELECT ctid AS place, * FROM eventlog.events
    WHERE namespace = $1 AND topic = topics.topic AND delivered = FALSE AND sequence > topics.after
      AND event_type IS NOT NULL AND event_type NOT IN (SELECT event_type FROM types)
    ORDER BY sequence LIMIT topics.size FOR UPDATE SKIP LOCKED) e
), horizon AS (
  SELECT min(last) AS sequence FROM (
    SELECT max(sequence) AS last FROM batch WHERE ordered GROUP BY key HAVING count(*) >= min(size)) filled
), made AS (
  {_INTO}
  {_OWED.format(now="$2", id_head="$7")}
  FROM batch e JOIN subscribed s ON s.event_type = e.event_type
  WHERE {_TAKEN}
  UNION ALL
  {_OWED.format(now="$2", id_head="$7")}
  FROM batch e JOIN subscribed s ON s.topic = e.topic AND s.topic <> ''
  WHERE {_TAKEN} AND NOT EXISTS (
    SELECT FROM subscribed o WHERE o.handler_name = s.handler_name AND o.event_type = e.event_type)
  {{unless_made}}
  RETURNING {{made}}
), done AS (
  UPDATE eventlog.events SET delivered = TRUE WHERE ctid = ANY (ARRAY(SELECT place FROM batch e WHERE {_TAKEN}))
)
SELECT key, count(*) FILTER (WHERE {_TAKEN}) AS events,
  count(*) >= min(size) OR NOT bool_and({_TAKEN}) AS is_full, (SELECT count(*) FROM made) AS notifications,
  max(sequence) FILTER (WHERE {_TAKEN}) AS reached, set_config('synchronous_commit', 'off', TRUE){{no_row}}
FROM batch e GROUP BY key HAVING bool_or({_TAKEN})
"""
_COLUMNS = 6
_NO_ROW = f"NULL::uuid, {'NULL::text, ' * 4}NULL::int, {'NULL::bigint, ' * 3}NULL::text"


def _plainly(unless_made: str) -> str:
    return _FAN_OUT.format(unless_made=unless_made, made="1", no_row="")


def _handing_over(unless_made: str) -> str:
    """The same, and behind it the rows that it has made, as they would be found, for whoever takes them at once."""
    return f"""
{_FAN_OUT.format(unless_made=unless_made, made="n.*", no_row=f", {_NO_ROW}")}
UNION ALL
(SELECT {", ".join(["NULL"] * _COLUMNS)}, {DUE_COLUMNS}
FROM made n WHERE n.handler_name = ANY ($9::text[]) AND n.next_retry_at <= $2 LIMIT $10)
"""


# To be ready for a row that is there already costs a twentieth of the statement, and a record of WAL for each row; and
# there is none, unless somebody has set `delivered` back. So that is found out by the unique index.
FAN_OUT, FAN_OUT_HANDING_OVER = _plainly(""), _handing_over("")
UNLESS_MADE = "ON CONFLICT (event_id, handler_name) DO NOTHING"
MADE_BEFORE = {FAN_OUT: _plainly(UNLESS_MADE), FAN_OUT_HANDING_OVER: _handing_over(UNLESS_MADE)}
MADE_BEFORE_FOR = 60.0  # seconds, after some had been made before

ANY_UNDELIVERED = f"""
WITH live AS MATERIALIZED (
  SELECT handler_name, event_type, topic, aliases, last_seen_date
  FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $2
), subscribed AS MATERIALIZED (
  SELECT * FROM live WHERE handler_name NOT IN ({_RENAMED})
)
SELECT EXISTS (
  SELECT FROM (SELECT DISTINCT event_type FROM subscribed WHERE topic = '') t CROSS JOIN LATERAL (
    SELECT FROM eventlog.events e WHERE e.namespace = $1 AND e.event_type = t.event_type AND e.delivered = FALSE
    ORDER BY e.sequence LIMIT 1) e
  UNION ALL
  SELECT FROM (SELECT DISTINCT topic FROM subscribed WHERE topic <> '') t CROSS JOIN LATERAL (
    SELECT FROM eventlog.events e WHERE e.namespace = $1 AND e.topic = t.topic AND e.delivered = FALSE
      AND e.event_type IS NOT NULL
    ORDER BY e.sequence LIMIT 1) e)
"""

COUNT_UNDELIVERED = """
SELECT count(*) FROM eventlog.events WHERE namespace = $1 AND delivered = FALSE AND event_type IS NOT NULL
"""

PAYLOADS = """
SELECT payload::text FROM eventlog.events WHERE namespace = $1 AND event_type = ANY ($2::text[]) ORDER BY sequence
"""

# What a handler had under a former name of its own is not made again.
BACKFILL = f"""
{_INTO}
{_OWED.format(now="$5", id_head="$6")}
FROM eventlog.events e JOIN eventlog.subscriptions s
  ON s.namespace = e.namespace AND (s.event_type = e.event_type OR s.topic = e.topic AND s.topic <> '')
WHERE e.namespace = $1 AND s.handler_name = $2 AND e.delivered = TRUE AND e.event_date >= $4
  AND (cardinality($3::text[]) = 0 OR e.event_type = ANY ($3))
  AND NOT EXISTS (SELECT FROM eventlog.event_notifications n
    WHERE n.event_id = e.id AND s.aliases @> to_jsonb(n.handler_name::text))
ORDER BY e.sequence
ON CONFLICT (event_id, handler_name) DO NOTHING
"""


class PostgresEvents:
    def __init__(self, fanout: Dedicated, admin: Dedicated) -> None:
        self._fanout = fanout
        self._admin = admin
        self._made_before_until = float("-inf")

    async def fan_out(
        self,
        namespace: str,
        now: datetime,
        seen_since: datetime,
        rooms: Mapping[str, int],
        batch_size: int,
        after: Mapping[str, int] | None = None,
        *,
        expected: bool = False,
        committed: Sequence[EventRecord] = (),
        handover: Handover | None = None,
    ) -> FannedOut:
        rows = await self._fan_out(
            FAN_OUT if handover is None else FAN_OUT_HANDING_OVER,
            namespace,
            now,
            seen_since,
            list(rooms.keys()),
            as_texts(rooms.values()),
            batch_size,
            id_head(),
            as_texts((after or {}).get(key) for key in rooms),
            *(() if handover is None else (list(handover.names), handover.most)),
        )
        if handover is not None:
            handover.hand([Notification(*row[_COLUMNS:]) for row in rows if row["key"] is None])
            rows = [row for row in rows if row["key"] is not None]
        return FannedOut(
            events={row["key"]: row["events"] for row in rows},
            full=frozenset(row["key"] for row in rows if row["is_full"]),
            notifications=rows[0]["notifications"] if rows else 0,
            reached={row["key"]: row["reached"] for row in rows},
        )

    async def _fan_out(self, statement: str, *args: Any) -> list[Any]:
        """Run the statement; if rows are there already, in the form that passes them by, and so for a minute."""
        time = asyncio.get_running_loop().time
        if time() >= self._made_before_until:
            try:
                return await self._fanout.fetch(statement, *args)
            except asyncpg.UniqueViolationError:
                self._made_before_until = time() + MADE_BEFORE_FOR
        return await self._fanout.fetch(MADE_BEFORE[statement], *args)

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        return bool((await self._admin.fetch(ANY_UNDELIVERED, namespace, seen_since))[0][0])

    async def count_undelivered(self, namespace: str) -> int:
        return int((await self._admin.fetch(COUNT_UNDELIVERED, namespace))[0][0])

    async def payloads(self, namespace: str, types: Sequence[str]) -> list[str]:
        return [row[0] for row in await self._admin.fetch(PAYLOADS, namespace, list(types))]

    async def backfill(
        self, namespace: str, handler_name: str, types: Sequence[str], since: datetime, now: datetime
    ) -> int:
        return await self._admin.execute(BACKFILL, namespace, handler_name, list(types), since, now, id_head())


def id_head() -> str:
    """The first half of a UUIDv7, in hexadecimal digits: its time and its version."""
    return uuid7().hex[:16]
