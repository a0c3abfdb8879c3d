"""The notifications that fan-out creates: the parts of the statements, the handoff, and the fast path."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from outboxio.model.notification import Handoff
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.columns import BY_EVENT, notifications_of, partition_among
from outboxio.storage.mysql.connection import Arguments, LoopConnection, id_list, limit_of
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.notifications import AS_ONE, DOCUMENT, as_notifications
from outboxio.storage.protocols import FanoutRequest, FanoutResult
from outboxio.support.ids import uuid7

EVENTS_BY_ID = "eventlog.events e FORCE INDEX (PRIMARY)"

# The live subscriptions of all processes, so that a process of an old version also serves the handlers of a new one.
_IS_LIVE = "WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s"
LIVE = f"eventlog.subscriptions s {_IS_LIVE}"

# The same with the number of partitions; NULL without a row.
COUNTED = """eventlog.subscriptions s
  LEFT JOIN eventlog.handler_partitions p ON p.namespace = s.namespace AND p.handler_name = s.handler_name"""
LIVE_COUNTED = f"{COUNTED} {_IS_LIVE}"

# The payloads do not leave the database. The id is a UUIDv7 with the time of the round and the sequence of the event,
# so that InnoDB appends the rows to the clustered index in order.
_DUE = "GREATEST(COALESCE(e.available_at, %(now)s), %(now)s)"
_KEY = "CASE WHEN s.ordered THEN COALESCE(e.ordering_key, e.model_id) END"
INTO, _SELECT = notifications_of(
    {
        "id": (
            "LOWER(CONCAT(%(id_head)s, LPAD(HEX((e.sequence >> 12) & 4095), 3, '0'), '-8', "
            "LPAD(HEX(e.sequence & 4095), 3, '0'), '-', LEFT(SHA2(CONCAT(e.id, s.handler_name), 256), 12)))"
        ),
        "event_id": "e.id",
        "handler_name": "s.handler_name",
        "state": "'PENDING'",
        "attempts": "0",
        "next_retry_at": _DUE,
        "created_date": "%(now)s",
        "updated_date": "%(now)s",
        "ordering_key": _KEY,
        "partition_number": "{partition}",
        "priority": "s.priority",
        "retention_from": _DUE,
    }
)
# The number of partitions comes from the list of subscriptions, or from the joined table.
SELECT = _SELECT.replace("{partition}", partition_among("s.partitions", _KEY, "e.id"))
SELECT_COUNTED = _SELECT.replace("{partition}", partition_among("p.partitions", _KEY, "e.id"))

# An existing notification stays unchanged.
ONCE = "ON DUPLICATE KEY UPDATE id = eventlog.event_notifications.id"


def id_head() -> str:
    """Return the time and the version of a UUIDv7, for the ids of a round."""
    return str(uuid7())[:15]


# --- the handoff -----------------------------------------------------------------------------------
#
# The handoff on MySQL and MariaDB: the dispatcher gets rows before the COMMIT that stores them (decision 16).
#
# A single message creates the notifications, reads those that are due, marks the events and commits. The dispatcher
# gets the rows as soon as the driver has read them. The response to COMMIT arrives later, because the server waits for
# the disk. If COMMIT fails, handlers have run for rows that do not exist: the events are fanned out again, and the
# handlers run again, as after a lost outcome.

MAX_SEPARATE_ON_DISK = 250  # the most notifications to read as separate rows if an aggregate is on disk (MariaDB)
MAX_SEPARATE = 10  # the same if an aggregate is in memory

# NO_MRR: the rows are in memory, so MySQL does not have to sort them by location before it reads them.
JUST_MADE_FEW = f"""
SELECT /*+ NO_MRR(n) */ {DOCUMENT} AS document FROM {BY_EVENT}
WHERE n.event_id IN ({{ids}}) AND n.handler_name IN ({{names}}) AND n.state = 'PENDING' AND n.next_retry_at <= %(now)s
LIMIT {{most}}
"""
JUST_MADE = f"{AS_ONE} FROM ({JUST_MADE_FEW}) d"


def find_just_made(ids: str, events: int, handoff: Handoff, server: Server) -> tuple[str, dict[str, Any]]:
    """Return the statement that reads the notifications of ``events`` events for the handoff, and its arguments."""
    names = {f"to{number}": name for number, name in enumerate(handoff.names)}
    listed = ", ".join(f"%({name})s" for name in names)
    as_rows = events * len(names) <= (MAX_SEPARATE_ON_DISK if server.flavour.aggregates_in_files else MAX_SEPARATE)
    return (JUST_MADE_FEW if as_rows else JUST_MADE).format(ids=ids, names=listed, most=handoff.capacity), names


async def execute_with_handoff(
    connection: Any, message: str, args: Arguments, handoff: Handoff, reads: int = 0
) -> tuple[list[int], list[list[tuple[Any, ...]]]]:
    """Run a message that creates notifications, and hand them over as soon as the driver has read them.

    The first ``reads`` results with rows are not notifications. Returns the number of rows that each later statement
    changed, and the rows of the first ``reads`` results.
    """
    async with asyncio.timeout(limit_of(connection)):
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute(message, args)
        counts, found, has_more = list[int](), list[list[tuple[Any, ...]]](), True
        while has_more:
            if cursor.description is None:
                if len(found) == reads:
                    counts.append(int(cursor.rowcount))
            elif len(found) < reads:
                found.append(list(driver.rows(cursor)))
            else:
                handoff.hand(as_notifications(driver.rows(cursor)) or ())
            has_more = await cursor.nextset()
    return counts, found


# --- the fast path ---------------------------------------------------------------------------------
#
# The fast path of fan-out: events that this process has just committed are claimed by id, in a single message.
#
# The message creates the notifications, reads the rows for the handoff, marks the events and commits, so the process
# cannot decide anything between the statements. The following is left to the regular path (``fanout.py``):
#
# * events that another transaction has locked: the whole message fails (NOWAIT);
# * all events, while a live handler is ordered or has aliases;
# * events without a live handler: an event is only marked if it has a notification.
#
# The fast path saves 0.7 ms for a single event (decision 16).

CLAIM_COMMITTED = f"SELECT e.id FROM {EVENTS_BY_ID} WHERE e.id IN ({{ids}}) AND e.delivered = FALSE FOR UPDATE NOWAIT"
NOTIFY_COMMITTED = f"""
{INTO}
{SELECT_COUNTED}
FROM {EVENTS_BY_ID} STRAIGHT_JOIN {LIVE_COUNTED}
  AND (e.event_type = s.event_type AND s.topic = '' OR e.topic = s.topic AND s.topic <> '')
  AND e.id IN ({{ids}}) AND e.delivered = FALSE
  AND NOT EXISTS (SELECT 1 FROM {LIVE} AND (s.ordered OR JSON_LENGTH(s.aliases) > 0))
{ONCE}
"""
MARK_COMMITTED = f"""
UPDATE {EVENTS_BY_ID} SET e.delivered = TRUE WHERE e.id IN ({{ids}}) AND e.delivered = FALSE AND EXISTS (
  SELECT 1 FROM eventlog.event_notifications n FORCE INDEX (event_notifications_event)
  WHERE n.event_id = e.id AND n.created_date = %(now)s)
"""


async def take_committed(
    loop: LoopConnection, server: Server, request: FanoutRequest, keys: Mapping[str, str], handoff: Handoff
) -> FanoutResult | None:
    """Create the notifications of known events; ``None`` if another transaction has locked any of them.

    ``keys``: the name of the key of each event id.
    """
    ids = id_list(keys)
    claim, notify, mark = (text.format(ids=ids) for text in (CLAIM_COMMITTED, NOTIFY_COMMITTED, MARK_COMMITTED))
    just_made, names = find_just_made(ids, len(keys), handoff, server)
    values = {
        **names, "namespace": request.namespace, "seen_since": request.seen_since, "now": request.now,
        "id_head": id_head(),
    }  # fmt: skip
    try:
        async with loop.transaction() as (connection, begin, commit):
            message = f"{begin}; {claim}; {notify}; {just_made}; {mark}; {commit}"
            (made, marked, *_), (claimed,) = await execute_with_handoff(connection, message, values, handoff, reads=1)
    except Exception as error:
        if errors.number(error) not in (errors.LOCKED, errors.MAY_NOT_WAIT):
            raise
        return None
    # An event whose last handler has just disappeared is claimed but not marked. The total is right; the counts by key
    # may include the wrong event.
    events = Counter(keys[event_id] for (event_id,) in claimed[:marked])
    return FanoutResult(dict(events), frozenset(), made, looked_at=frozenset(keys.values()))
