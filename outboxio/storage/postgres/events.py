"""The ``events`` table on PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from outboxio.model.notification import COPIED
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.columns import DUE_COLUMNS, partition_of
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.postgres.notifications import as_notifications
from outboxio.storage.protocols import FanoutRequest, FanoutResult
from outboxio.support.ids import uuid7

# The id is a UUIDv7: the time of the round, 20 bits of the event's sequence, 42 random bits. So a round appends
# rows to the index of ids, and rows that are settled together are stored together. The number is negative because of
# the variant bits. Writing the time into the text of gen_random_uuid() takes 1.9 us; this takes 0.5 us.
_ID = """
({id_head} || to_hex(((-2)::bigint << 62) + ((e.sequence & 1048575) << 42)
    + floor(random() * 4398046511104)::bigint))::uuid
""".strip()

_ORDERING_KEY = "CASE WHEN s.ordered THEN coalesce(e.ordering_key, e.model_id) END"

# The columns of a notification of the event ``e`` for the subscription ``s``.
_MADE = {
    "id": _ID,
    "event_id": "e.id",
    "handler_name": "s.handler_name",
    **{column: f"e.{column}" for column in COPIED},
    "state": "'PENDING'",
    "attempts": "0",
    "next_retry_at": "greatest(e.available_at, {now})",
    "created_date": "{now}",
    "updated_date": "{now}",
    "ordering_key": _ORDERING_KEY,
    "priority": "s.priority",
    "retention_from": "greatest(e.available_at, {now})",
    "partition_number": f"""
CASE WHEN {{partitions}} > 1 THEN {partition_of(_ORDERING_KEY, "e.id", "{partitions}")} ELSE 0::smallint END
""".strip(),
}
_INTO = f"INSERT INTO eventlog.event_notifications AS n ({', '.join(_MADE)})"
_OWED = f"SELECT {', '.join(_MADE.values())}"
_OWED_PLAIN = f"SELECT {', '.join({**_MADE, 'ordering_key': 'NULL', 'partition_number': '0'}.values())}"

# One statement reads one snapshot and joins the live subscriptions of all processes, so a process of an old version
# also serves the handlers of a new version. The lateral subquery scans the index of each type separately, and SKIP
# LOCKED never waits for a producer. If both the type and the topic of an event have subscriptions, the event is taken
# once, by its type.
#
# A handler name that is an alias of a live handler gets no new rows. If two names are aliases of each other, because a
# rename was reverted, the name that was last seen earlier gets none.
#
# Events for ordered handlers are taken up to a horizon: the last event of a key that reached its limit, because the
# following events of that key are unknown. An event of any type may be on a topic with an ordered handler. Without
# ordered handlers, PostgreSQL never computes the horizon.
_TAKEN = "(NOT e.ordered OR e.sequence <= coalesce((SELECT sequence FROM horizon), e.sequence))"
_RENAMED = """
SELECT a.name FROM live l CROSS JOIN LATERAL jsonb_array_elements_text(l.aliases) AS a(name)
WHERE l.aliases <> '[]' AND NOT EXISTS (
  SELECT FROM live o WHERE o.handler_name = a.name AND o.aliases @> to_jsonb(l.handler_name::text)
    AND (o.last_seen_date, o.handler_name) > (l.last_seen_date, l.handler_name))
"""
# The index keeps the entries of delivered events for as long as an open transaction may read them. So a round continues
# after the scan position of the previous round. The transaction ids show up to which sequence no open transaction can
# still commit an event.
_AFTER = """
coalesce(CASE WHEN t.ordered THEN {closed}::bigint ELSE coalesce(limits.after, $9::bigint) END, (-2)::bigint << 62)
  AS after
""".strip()
_LIMITS = "unnest($4::text[], $5::text[]::bigint[], $8::text[]::bigint[]) AS limits(key, size, after)"
_UNDELIVERED = """
    SELECT ctid AS place, * FROM eventlog.events
    WHERE namespace = $1 AND event_type = types.event_type AND delivered = FALSE AND sequence > types.after
    ORDER BY sequence LIMIT types.size FOR UPDATE SKIP LOCKED
""".strip()
_OLDEST_OPEN, _NEXT = (f"(SELECT pg_snapshot_{end}(pg_current_snapshot())::text::bigint)" for end in ("xmin", "xmax"))
# synchronous_commit = off: the commit does not wait for the disk (decision 1). If the server crashes before the next
# synchronous commit, the events of the round are undelivered again, and the next round takes them again. Outcomes are
# committed synchronously, which makes all earlier rounds durable.
_FAN_OUT = f"""
WITH live AS MATERIALIZED (
  SELECT handler_name, event_type, topic, aliases, priority, ordered, last_seen_date
  FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $3
), renamed AS MATERIALIZED (
  {_RENAMED}
), subscribed AS MATERIALIZED (
  SELECT live.*, p.partitions FROM live
  LEFT JOIN eventlog.handler_partitions p ON p.namespace = $1 AND p.handler_name = live.handler_name
  WHERE live.handler_name NOT IN (SELECT name FROM renamed)
), limits AS MATERIALIZED (
  SELECT * FROM {_LIMITS}
), types AS MATERIALIZED (
  SELECT t.event_type, coalesce(limits.size, greatest(1, $6::bigint / count(*) OVER ())) AS size, t.ordered, {_AFTER}
  FROM (SELECT event_type, bool_or(ordered) OR (SELECT coalesce(bool_or(ordered), FALSE) FROM subscribed
          WHERE topic <> '') AS ordered
        FROM subscribed WHERE topic = '' GROUP BY event_type) t
    LEFT JOIN limits ON limits.key = t.event_type
), topics AS MATERIALIZED (
  SELECT t.topic, coalesce(limits.size, greatest(1, $6::bigint / count(*) OVER ())) AS size, t.ordered, {_AFTER}
  FROM (SELECT topic, bool_or(ordered) AS ordered FROM subscribed WHERE topic <> '' GROUP BY topic) t
    LEFT JOIN limits ON limits.key = '#' || t.topic
), batch AS MATERIALIZED (
  SELECT e.*, e.event_type AS key, types.size, types.ordered FROM types CROSS JOIN LATERAL (
    {_UNDELIVERED}) e
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
  {_OWED.format(now="$2", id_head="$7", partitions="s.partitions")}
  FROM batch e JOIN subscribed s ON s.event_type = e.event_type
  WHERE {_TAKEN}
  UNION ALL
  {_OWED.format(now="$2", id_head="$7", partitions="s.partitions")}
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
  max(sequence) FILTER (WHERE {_TAKEN}) AS reached, {_OLDEST_OPEN} AS oldest_open, {_NEXT} AS next,
  set_config('synchronous_commit', 'off', TRUE){{no_row}}
FROM batch e GROUP BY key HAVING bool_or({_TAKEN})
"""
# Most namespaces have only plain subscriptions: by type, without ordering, aliases and partitions. The plan of this
# statement has half as many nodes as the one above. It takes two thirds of the time for a single event, and half of it
# if there is no event. If a subscription is not plain, the statement takes no event and returns one row with the key
# _NOT_PLAIN.
_NOT_PLAIN = ""
_FAN_OUT_PLAIN = f"""
WITH live AS MATERIALIZED (
  SELECT handler_name, event_type, priority, topic <> '' OR ordered OR aliases <> '[]' AS is_not_plain
  FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $3
), not_plain AS MATERIALIZED (
  SELECT WHERE EXISTS (SELECT FROM live WHERE is_not_plain)
    OR EXISTS (SELECT FROM eventlog.handler_partitions WHERE namespace = $1 AND partitions > 1)
), batch AS MATERIALIZED (
  SELECT e.*, types.size FROM (
    SELECT event_type, coalesce(limits.size, greatest(1, $6::bigint / count(*) OVER ())) AS size,
      coalesce(limits.after, $9::bigint, (-2)::bigint << 62) AS after
    FROM (SELECT DISTINCT event_type FROM live WHERE NOT EXISTS (SELECT FROM not_plain)) t
      LEFT JOIN {_LIMITS} ON limits.key = t.event_type
  ) types CROSS JOIN LATERAL (
    {_UNDELIVERED}) e
), made AS (
  {_INTO}
  {_OWED_PLAIN.format(now="$2", id_head="$7")}
  FROM batch e JOIN live s ON s.event_type = e.event_type
  RETURNING {{made}}
), done AS (
  UPDATE eventlog.events SET delivered = TRUE WHERE ctid = ANY (ARRAY(SELECT place FROM batch))
)
SELECT event_type AS key, count(*) AS events, count(*) >= min(size) AS is_full,
  (SELECT count(*) FROM made) AS notifications, max(sequence) AS reached, {_OLDEST_OPEN} AS oldest_open,
  {_NEXT} AS next, set_config('synchronous_commit', 'off', TRUE){{no_row}}
FROM batch GROUP BY event_type
UNION ALL
SELECT '{_NOT_PLAIN}', 0, FALSE, 0, 0, 0, 0, NULL{{no_row}} FROM not_plain
"""
_COLUMNS = 8
_NO_ROW = f"NULL::uuid, {'NULL::text, ' * 4}NULL::int, {'NULL::bigint, ' * 3}NULL::smallint, NULL::text"


def _without_handoff(statement: str, unless_made: str = "") -> str:
    return statement.format(unless_made=unless_made, made="1", no_row="", closed="$10")


def _with_handoff(statement: str, unless_made: str = "") -> str:
    """Append the due rows for the dispatcher of this process (handoff, decision 16) to the rows of a statement."""
    return f"""
{statement.format(unless_made=unless_made, made="n.*", no_row=f", {_NO_ROW}", closed="$12")}
UNION ALL
(SELECT {", ".join(["NULL"] * _COLUMNS)}, {DUE_COLUMNS}
FROM made n WHERE n.handler_name = ANY ($10::text[]) AND n.next_retry_at <= $2 LIMIT $11)
"""


# A notification only exists before its fan-out if an operator has reset ``delivered``. ON CONFLICT costs 6 to 11 % of a
# drain and a WAL record per row. So fan-out uses it only after a unique violation.
UNLESS_MADE = "ON CONFLICT (event_id, handler_name) DO NOTHING"
FAN_OUT, FAN_OUT_PLAIN = _without_handoff(_FAN_OUT), _without_handoff(_FAN_OUT_PLAIN)
_PLAIN = {False: FAN_OUT_PLAIN, True: _with_handoff(_FAN_OUT_PLAIN)}
_FULL = {False: FAN_OUT, True: _with_handoff(_FAN_OUT)}
_WITH_CONFLICTS = {False: _without_handoff(_FAN_OUT, UNLESS_MADE), True: _with_handoff(_FAN_OUT, UNLESS_MADE)}
NOT_PLAIN_SECONDS = CONFLICTS_SECONDS = 60.0  # how long to use _FULL, or _WITH_CONFLICTS, before _PLAIN is tried again

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


class PostgresEvents:
    def __init__(self, fanout: LoopConnection, admin: LoopConnection) -> None:
        self._fanout = fanout
        self._admin = admin
        self._conflicts_until = self._not_plain_until = float("-inf")

    async def fan_out(self, request: FanoutRequest) -> FanoutResult:
        limits, handoff = request.limits, request.handoff
        args = (
            request.namespace,
            request.now,
            request.seen_since,
            list(limits.keys()),
            as_texts(limits.values()),
            request.batch_size,
            id_head(),
            as_texts(request.after.get(key) for key in limits),
            request.behind,
            *(() if handoff is None else (list(handoff.names), handoff.capacity)),
        )
        rows = await self._fan_out(handoff is not None, args, request.closed)
        if handoff is not None:
            handoff.hand(as_notifications(row[_COLUMNS:] for row in rows if row["key"] is None))
            rows = [row for row in rows if row["key"] is not None]
        return FanoutResult(
            events={row["key"]: row["events"] for row in rows},
            full=frozenset(row["key"] for row in rows if row["is_full"]),
            notifications=rows[0]["notifications"] if rows else 0,
            reached={row["key"]: row["reached"] for row in rows},
            transactions=(rows[0]["oldest_open"], rows[0]["next"]) if rows else None,
        )

    async def _fan_out(self, has_handoff: bool, args: tuple[Any, ...], closed: int | None) -> list[Any]:
        now, fetch = asyncio.get_running_loop().time(), self._fanout.fetch
        try:
            if now >= self._not_plain_until:
                rows = await fetch(_PLAIN[has_handoff], *args)
                if not rows or rows[0]["key"] != _NOT_PLAIN:
                    return rows
                self._not_plain_until = now + NOT_PLAIN_SECONDS
            statements = _WITH_CONFLICTS if now < self._conflicts_until else _FULL
            return await fetch(statements[has_handoff], *args, closed)
        except errors.named("UniqueViolation"):
            self._conflicts_until = self._not_plain_until = now + CONFLICTS_SECONDS
            return await fetch(_WITH_CONFLICTS[has_handoff], *args, closed)

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        return bool((await self._admin.fetch(ANY_UNDELIVERED, namespace, seen_since))[0][0])


def id_head() -> str:
    """Return the first half of a UUIDv7 in hexadecimal digits: the time and the version."""
    return uuid7().hex[:16]
