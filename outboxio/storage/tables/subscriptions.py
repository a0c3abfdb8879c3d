"""The tables ``subscriptions`` and ``pauses``, and the start dates and holders in ``leases``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256

import msgspec

from outboxio.handlers.options import Subscription
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols.values import Announced, ControlState, Holder, PartitionCount, Pause
from outboxio.storage.statement import Jumps, Port, Query, Statement
from outboxio.support.clock import utc_now

# --- statements ------------------------------------------------------------------------------------

_ANNOUNCE = """
INSERT INTO eventlog.subscriptions (namespace, handler_name, event_type, topic, aliases, priority, ordered,
  last_seen_date, partitioned_seen_date)
SELECT :namespace, s.handler_name, s.event_type, s.topic, {json s.aliases}, s.priority, s.ordered, :now, :now
FROM {rows :subscriptions s handler_name text, event_type text, topic text, aliases document, priority int,
  ordered bool}
"""
_REPLACED = "aliases = excluded.aliases, priority = excluded.priority, ordered = excluded.ordered"
# A process of an older version, without partitions, writes only last_seen_date. If the two dates differ, such a process
# is running, and older_seen_date keeps its date. MySQL assigns from left to right. SQLite has no partitions.
ANNOUNCE = Statement(
    "",
    postgres=f"""{_ANNOUNCE} ORDER BY s.handler_name, s.event_type, s.topic
ON CONFLICT (namespace, handler_name, event_type, topic) DO UPDATE SET {_REPLACED},
  last_seen_date = greatest(subscriptions.last_seen_date, excluded.last_seen_date),
  partitioned_seen_date = greatest(subscriptions.last_seen_date, excluded.last_seen_date),
  older_seen_date = CASE WHEN subscriptions.partitioned_seen_date IS DISTINCT FROM subscriptions.last_seen_date
    THEN subscriptions.last_seen_date ELSE subscriptions.older_seen_date END
""",
    mysql=f"""{_ANNOUNCE}
ON DUPLICATE KEY UPDATE aliases = s.aliases, priority = s.priority, ordered = s.ordered,
  older_seen_date = IF(eventlog.subscriptions.last_seen_date <=> eventlog.subscriptions.partitioned_seen_date,
    eventlog.subscriptions.older_seen_date, eventlog.subscriptions.last_seen_date),
  partitioned_seen_date = GREATEST(eventlog.subscriptions.last_seen_date, :now),
  last_seen_date = GREATEST(eventlog.subscriptions.last_seen_date, :now)
""",
    sqlite=f"""{_ANNOUNCE.replace(", partitioned_seen_date", "").replace(":now, :now", ":now")} WHERE TRUE
ON CONFLICT (namespace, handler_name, event_type, topic) DO UPDATE SET {_REPLACED},
  last_seen_date = max(last_seen_date, excluded.last_seen_date)
""",
)
ANNOUNCED = Query(
    """
SELECT handler_name, event_type, topic, {text aliases}, last_seen_date FROM eventlog.subscriptions
WHERE namespace = :namespace
""",
    Announced,
)

# A lease without a holder: acquired_date is the first announcement of the handler (decision 24).
SET_START_DATES = Statement("""
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT b.name, 0, :owner, coalesce(b.date, {now}), 0 FROM {rows :begun b name text, date timestamp} WHERE TRUE
ORDER BY b.name {keep leases: name}
""")
START_DATES = Query("SELECT name, acquired_date FROM eventlog.leases WHERE {among name :names}", tuple[str, datetime])
HOLDERS = Query(
    """
SELECT name, owner, acquired_date, released_term >= term FROM eventlog.leases WHERE {among name :names} AND term > 0
""",
    tuple[str, str, datetime, bool],
)

# Processes with different jobs have different locks, whose names end in a digest. LIKE would ignore case on SQLite.
JOB_HOLDERS = Query(
    """
SELECT name, owner, acquired_date, released_term >= term FROM eventlog.leases
WHERE substr(name, 1, :length) = :prefix AND term > 0 ORDER BY name
""",
    tuple[str, str, datetime, bool],
)

# A handler that is already paused keeps the date of the pause. MySQL assigns from left to right.
_PAUSE = """
INSERT INTO eventlog.pauses (namespace, handler_name, paused_date) VALUES (:namespace, :handler_name, :now)
"""
PAUSE = Statement(
    f"""{_PAUSE}
ON CONFLICT (namespace, handler_name) DO UPDATE SET paused_date = excluded.paused_date, ended_date = NULL
WHERE pauses.ended_date IS NOT NULL
""",
    mysql=f"""{_PAUSE}
ON DUPLICATE KEY UPDATE paused_date = IF(ended_date IS NULL, paused_date, :now), ended_date = NULL
""",
    sqlite=f"""{_PAUSE}
ON CONFLICT (namespace, handler_name) DO UPDATE SET paused_date = excluded.paused_date, ended_date = NULL
WHERE ended_date IS NOT NULL
""",
)
UNPAUSE = Statement("""
UPDATE eventlog.pauses SET ended_date = :now
WHERE namespace = :namespace AND handler_name = :handler_name AND ended_date IS NULL
""")
PAUSES = Query("SELECT handler_name, ended_date, paused_date FROM eventlog.pauses WHERE namespace = :namespace", Pause)

# Each process reads both tables once a second, so in a single statement. A pause has no partition count.
_PAUSES = """
SELECT handler_name, ended_date, NULL, NULL, NULL, NULL, NULL FROM eventlog.pauses WHERE namespace = :namespace
"""
_PARTITIONS = """
SELECT handler_name, changed_date, partitions, active, declared, auto_number, waited_date
FROM eventlog.handler_partitions WHERE namespace = :namespace
"""
CONTROL_STATE = Query(
    f"{_PAUSES} UNION ALL {_PARTITIONS}",
    tuple[str, datetime | None, int | None, int | None, int | None, int | None, datetime | None],
    postgres=f"{_PARTITIONS} UNION ALL {_PAUSES}",  # the first part determines the column types
    sqlite=_PAUSES,
)
# A process with runs in flight also reads whether an operator has cancelled runs. No handler has an empty name.
_CANCELS = """
SELECT '', NULL, NULL, NULL, NULL, NULL, NULL FROM {table operations operations_running}
WHERE namespace = :namespace AND state = 'RUNNING' AND kind = 'cancel'
"""
CONTROL_STATE_WITH_CANCELS = Query(
    f"{_PAUSES} UNION ALL {_PARTITIONS} UNION ALL {_CANCELS}",
    tuple[str, datetime | None, int | None, int | None, int | None, int | None, datetime | None],
    postgres=f"{_PARTITIONS} UNION ALL {_PAUSES} UNION ALL {_CANCELS}",
    sqlite=f"{_PAUSES} UNION ALL {_CANCELS}",
)


def _next_namespace(source: str, condition: str = "") -> str:
    # In a subquery, because SQLite does not allow LIMIT within UNION.
    return f"""SELECT n.namespace FROM (
  SELECT n.namespace FROM {source} WHERE n.namespace > :start {condition} ORDER BY n.namespace LIMIT 1) n"""


_OF_PROCESSES = " UNION ALL ".join(
    _next_namespace(source)
    for source in (
        "eventlog.subscriptions n", "{table jobs primary n}", "{table instance_reports primary n}",
        "{table handler_minutes primary n}",
    )
)  # fmt: skip
_EVENTS = "{table events events_undelivered n}"
_UNDELIVERED = _next_namespace(_EVENTS, "AND n.delivered = FALSE AND n.event_type IS NOT NULL")
# Announced handlers, jobs, processes, finished runs and undelivered events. On MySQL also delivered events: the index
# has all events, and those of a namespace without undelivered events would be read one by one.
NAMESPACES = Jumps(
    f"SELECT min(f.namespace) FROM ({_OF_PROCESSES} UNION ALL {_UNDELIVERED}) f",
    mysql=f"SELECT min(f.namespace) FROM ({_OF_PROCESSES} UNION ALL {_next_namespace(_EVENTS)}) f",
)

FORGET = Statement("DELETE FROM eventlog.subscriptions WHERE namespace = :namespace AND handler_name = :handler_name")

# --- the tables ------------------------------------------------------------------------------------


class Subscriptions:
    """Reads and writes the subscriptions that processes announce, and the pauses of operators."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        """Write the subscriptions of the handlers of this process, seen at ``now``."""
        # All processes lock the rows in the same order: that of the unique index on MySQL.
        rows = [
            {
                "handler_name": s.handler_name, "event_type": s.event_type, "topic": s.topic,
                "aliases": msgspec.json.encode(s.aliases).decode(), "priority": s.priority, "ordered": s.ordered,
            }
            for s in sorted(subscriptions, key=_names_digest)
        ]  # fmt: skip
        if rows:
            await self._port.execute(ANNOUNCE, namespace=namespace, now=now, subscriptions=rows)

    async def announced(self, namespace: str) -> list[Announced]:
        """Return the subscriptions of all handlers of a namespace, however old."""
        return await self._port.fetch(ANNOUNCED, namespace=namespace)

    async def set_start_dates(self, dates: Mapping[LockName, datetime | None], owner: str) -> None:
        """Store the start dates of handlers in ``leases``. Existing dates are kept.

        ``None``: now, by the clock of the database.
        """
        rows = [
            {"name": name.lease, "date": date and date.isoformat(" ", "microseconds")} for name, date in dates.items()
        ]
        if rows:
            await self._port.execute(SET_START_DATES, begun=rows, owner=owner, process_now=utc_now())

    async def start_dates(self, names: Sequence[LockName]) -> dict[LockName, datetime]:
        """Return the start dates that were stored first under these names."""
        by_lease = {name.lease: name for name in names}
        rows = await self._port.fetch(START_DATES, names=list(by_lease)) if names else []
        return {by_lease[lease]: date for lease, date in rows}

    async def holders(self, names: Sequence[LockName]) -> dict[LockName, Holder]:
        """Return the last holders of these locks. Locks that were never acquired are left out."""
        by_lease = {name.lease: name for name in names}
        rows = await self._port.fetch(HOLDERS, names=list(by_lease)) if names else []
        return {by_lease[lease]: Holder(owner, since, given_back) for lease, owner, since, given_back in rows}

    async def job_holders(self, namespace: str) -> dict[str, Holder]:
        """Return the last holders of the job locks, by lease name."""
        prefix = f"{LockName(namespace, 'jobs').lease}/"
        rows = await self._port.fetch(JOB_HOLDERS, prefix=prefix, length=len(prefix))
        return {lease: Holder(owner, since, given_back) for lease, owner, since, given_back in rows}

    async def namespaces(self) -> list[str]:
        """Return the namespaces of processes and waiting events, by jumps along the indexes."""
        return await self._port.fetch(NAMESPACES)

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        """Return the names and aliases of all handlers that a process announced after ``seen_since``."""
        return {n for one in await self.announced(namespace) if one.last_seen_date > seen_since for n in one.names}

    async def names_of(self, namespace: str, handler_name: str) -> set[str]:
        """Return the handler name and all aliases that were ever announced with it."""
        announced = await self.announced(namespace)
        return {handler_name, *(name for one in announced if one.handler_name == handler_name for name in one.names)}

    async def pause(self, namespace: str, handler_name: str, now: datetime) -> None:
        """Pause a handler. A handler that is already paused keeps the date of the pause."""
        await self._port.execute(PAUSE, namespace=namespace, handler_name=handler_name, now=now)

    async def unpause(self, namespace: str, handler_name: str, now: datetime) -> int:
        """Resume a paused handler; return 1, or 0 if it was not paused."""
        return await self._port.execute(UNPAUSE, namespace=namespace, handler_name=handler_name, now=now)

    async def pauses(self, namespace: str) -> list[Pause]:
        """Return all pauses, also ended ones: the retention of rows that waited counts from the end of the pause."""
        return await self._port.fetch(PAUSES, namespace=namespace)

    async def control_state(self, namespace: str, *, cancels: bool = False) -> ControlState:
        """Return the pauses and partition counts, and with ``cancels`` whether runs should be cancelled."""
        query = CONTROL_STATE_WITH_CANCELS if cancels else CONTROL_STATE
        rows = await self._port.fetch(query, namespace=namespace)
        if not rows:
            return ControlState([], [])
        return ControlState(
            [Pause(name, ended) for name, ended, number, *_ in rows if number is None and name],
            [
                PartitionCount(name, number, active or number, changed, declared or 1, auto, waited)
                for name, changed, number, active, declared, auto, waited in rows
                if number is not None and changed is not None
            ],
            has_cancels=cancels and any(not name for name, *_ in rows),
        )

    async def forget(self, namespace: str, handler_name: str) -> int:
        """Remove the subscriptions of a handler; return the number of rows."""
        return await self._port.execute(FORGET, namespace=namespace, handler_name=handler_name)


def _names_digest(subscription: Subscription) -> tuple[bytes, ...]:
    """Return the parts of the column ``names_digest``, which orders the unique index on MySQL."""
    names = (subscription.handler_name, subscription.event_type, subscription.topic)
    return tuple(sha256(name.encode()).digest() for name in names)
