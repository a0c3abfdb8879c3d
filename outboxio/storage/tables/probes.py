"""The figures of overview, health and metrics.

Every statement reads a bounded number of index entries. Most handlers have nothing to count, so a first statement finds
the names with rows, and a second one counts the rows of these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_DEFERRED, FIRST_POSITION
from outboxio.storage.protocols.operating import Counted, DeadFigures, DueFigures, ParkedKey
from outboxio.storage.protocols.values import Waiting
from outboxio.storage.statement import Jumps, Port, Query, Text

FAR = timedelta(days=366)
"""A row that is due even later has probably been scheduled by mistake."""
MAX_EXAMINED = 10_000
SAMPLED, MAX_SAMPLED_BOUND = 500, 10_000
MICROSECOND = timedelta(microseconds=1)

# --- due rows --------------------------------------------------------------------------------------

_DUE = "{table event_notifications event_notifications_partition n}"
_PARTITION = "AND n.partition_number = w.number"
_OF_SLOT = f"n.namespace = :namespace AND {{unfinished}} AND n.handler_name = w.name {_PARTITION}"
# The first and the last row of each slot: with a condition on the date, MySQL would read all rows of the slot. ORDER BY
# includes the columns that differ between slots, as in mysql/ordering.py. PostgreSQL gets a range of one partition, so
# that only the index with the partition returns the rows in order.
_ENDS = f"""
SELECT f.name, min(f.first), max(f.last) FROM (
  SELECT w.name, (SELECT n.next_retry_at FROM {_DUE} WHERE {_OF_SLOT}
      ORDER BY n.handler_name, n.partition_number, n.next_retry_at, n.sequence LIMIT 1) AS first,
    (SELECT n.next_retry_at FROM {_DUE} WHERE {_OF_SLOT}
      ORDER BY n.handler_name DESC, n.partition_number DESC, n.next_retry_at DESC, n.sequence DESC LIMIT 1) AS last
  FROM {{rows :slots w name text, number int}}) f
GROUP BY f.name
"""
ENDS = Query(
    _ENDS,
    tuple[str, datetime | None, datetime | None],
    postgres=_ENDS.replace("= w.number", "BETWEEN w.number AND w.number"),
    sqlite=_ENDS.replace(_PARTITION, "").replace("n.partition_number, ", "").replace("n.partition_number DESC, ", ""),
)

# MySQL: the partitions are a list of numbers, so that each partition is a separate range.
_AMONG = "AND n.partition_number IN (:partitions)"
_OF_NAME = "n.namespace = :namespace AND {unfinished} AND n.handler_name = :name"
_POSITION = "(n.partition_number, n.next_retry_at)"
_IS_DUE = Text(
    f"{_AMONG} AND n.next_retry_at <= :now",
    postgres=f"AND n.partition_number >= p.number AND {_POSITION} <= (p.number, :now)",
    sqlite="AND n.next_retry_at <= :now",
)


def _between(after: str, before: str) -> Text:
    """Return the condition for rows that are due between two times."""
    dates = f"AND n.next_retry_at > {after} AND n.next_retry_at < {before}"
    return Text(
        f"{_AMONG} {dates}",
        postgres=f"AND {_POSITION} > (p.number, {after}) AND {_POSITION} < (p.number, {before})",
        sqlite=dates,
    )


def _range(bounds: str, columns: str, most: str = ":most") -> Text:
    """Return the query for up to ``most`` rows of a name in a range of due dates; on PostgreSQL by partition."""
    found = f"SELECT {columns} FROM {_DUE} WHERE {_OF_NAME} {{{bounds}}}"
    return Text(
        f"{found} LIMIT {most}",
        postgres=f"""SELECT n.* FROM unnest(:partitions) AS p(number) CROSS JOIN LATERAL (
      {found} ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT {most}) n LIMIT {most}""",
    )


# The state is not in the index, so only a sample of the rows that are due later is checked for it.
COUNT_DUE = Query(
    """
SELECT :name, d.number, l.number, s.number, s.retrying, f.number FROM
  (SELECT count(*) AS number FROM ({due}) c) d,
  (SELECT count(*) AS number FROM ({later}) c) l,
  (SELECT count(*) AS number, count(CASE WHEN c.state <> 'PENDING' THEN 1 END) AS retrying FROM ({sample}) c) s,
  (SELECT count(*) AS number FROM ({far}) c) f
""",
    tuple[str, int, int, int, int, int],
    each="name text, partitions int[]",
).having(
    due=_range("is_due", "1 AS one"), is_due=_IS_DUE,
    later=_range("is_later", "1 AS one"), is_later=_between(":now", ":far"),
    sample=_range("is_later", "n.state", ":sampled"),
    far=_range("is_far", "1 AS one"), is_far=_between(":near", ":first_deferred"),
)  # fmt: skip

# The failed rows among those that are due first. They may be due, or wait for a retry.
FAILING = Query(
    """
SELECT :name, f.id FROM (
  SELECT c.id FROM ({unfinished_rows}) c WHERE c.state <> 'PENDING' AND c.retention_from < :before LIMIT :most) f
""",
    tuple[str, UUID],
    each="name text, partitions int[]",
).having(
    unfinished_rows=_range("is_not_deferred", "n.id, n.state, n.retention_from", ":among"),
    is_not_deferred=_between(":start", ":first_deferred"),
)

# --- BLOCKED rows ----------------------------------------------------------------------------------

_QUEUE = "{table event_notifications event_notifications_line n}"
_IN_ORDER = "ORDER BY n.ordering_key, n.sequence"
_BLOCKED = f"FROM {_QUEUE} WHERE n.namespace = :namespace AND {{blocked}}"
_NAMES = "{rows :names w name text}"

WITH_QUEUE = Query(
    f"""
SELECT w.name FROM {_NAMES} WHERE (
  SELECT 1 FROM {_QUEUE} WHERE n.namespace = :namespace AND n.handler_name = w.name AND {{in_queue}}
  {_IN_ORDER} LIMIT 1) = 1
""",
    str,
    mysql=f"SELECT w.name FROM {_NAMES} WHERE (SELECT 1 {_BLOCKED} AND n.handler_name = w.name LIMIT 1) = 1",
)
COUNT_BLOCKED = Query(
    f"""
SELECT :name, count(*) FILTER (WHERE n.state = 'BLOCKED'), count(*) FROM (
  SELECT n.state FROM {_QUEUE} WHERE n.namespace = :namespace AND n.handler_name = :name AND {{in_queue}}
  {_IN_ORDER} LIMIT :most) n
""",
    tuple[str, int, int],
    mysql=f"SELECT :name, COUNT(*), COUNT(*) FROM (SELECT 1 {_BLOCKED} AND n.handler_name = :name LIMIT :most) c",
    each="name text",
)

# --- DEAD and EXPIRED rows -------------------------------------------------------------------------

_DEAD = "{table event_notifications event_notifications_dead n}"
_OF_DEAD = f"FROM {_DEAD} WHERE n.namespace = :namespace AND {{dead}} AND {{dead_name}}"


# On MariaDB the state is a column of the index, so each probe becomes two (decision 43).
def _of_state(state: str, columns: str, condition: str, order: str) -> str:
    return f"""(SELECT {columns} FROM {_DEAD}
  WHERE n.namespace = :namespace AND n.state = '{state}' AND {condition} ORDER BY {order} LIMIT 1)"""


def _next_name(state: str) -> str:
    return _of_state(state, "n.handler_name AS name", "n.handler_name > :start", "n.handler_name")


def _newest(state: str) -> str:
    newest = _of_state(state, "n.updated_date", "n.handler_name = w.name", "n.updated_date DESC, n.id DESC")
    return f"IFNULL({newest}, {_NEVER})"


_NEVER = "TIMESTAMP'1000-01-01 00:00:00'"
DEAD_NAMES = Jumps(
    f"SELECT {{dead_name}} {_OF_DEAD} > :start ORDER BY {{dead_name}} LIMIT 1",
    mariadb=f"SELECT MIN(d.name) FROM ({_next_name('DEAD')} UNION ALL {_next_name('EXPIRED')}) d",
)
NEWEST_DEAD = Query(
    f"""
SELECT w.name,
  (SELECT {{dead_date}} {_OF_DEAD} = w.name ORDER BY {{dead_name}} DESC, {{dead_date}} DESC, n.id DESC LIMIT 1)
FROM {_NAMES}
""",
    tuple[str, datetime | None],
    mariadb=f"SELECT w.name, NULLIF(GREATEST({_newest('DEAD')}, {_newest('EXPIRED')}), {_NEVER}) FROM {_NAMES}",
)
_COUNT_DEAD = f"""
SELECT :name, (SELECT count(*) FROM (SELECT 1 {_OF_DEAD} = :name LIMIT :most) c),
  (SELECT count(*) FROM (SELECT 1 {_OF_DEAD} = :name AND {{dead_date}} >= :since LIMIT :most) c)
"""
COUNT_DEAD = Query(
    _COUNT_DEAD,
    tuple[str, int, int],
    postgres=_COUNT_DEAD.replace("LIMIT", "ORDER BY n.updated_date DESC, n.id DESC LIMIT"),  # only this index fits
    each="name text",
)

# --- parked keys -----------------------------------------------------------------------------------

MAX_JUMPS = 1000
MAX_BLOCKED = 1000

_PARKED = "{table event_notifications event_notifications_parked n}"
_IN_PARKED = "n.ordering_key IS NOT NULL AND n.state IN ('DEAD', 'EXPIRED')"


def _next_waiting(after: str) -> str:
    return f"""(SELECT CAST(n.ordering_key AS TEXT) FROM {_QUEUE}
      WHERE n.namespace = :namespace AND n.handler_name = jump.blocked_name AND {{in_queue}} AND n.ordering_key {after}
      {_IN_ORDER} LIMIT 1)"""


_WAITING = f"""FROM {_QUEUE}
    WHERE n.namespace = :namespace AND n.handler_name = j.blocked_name AND {{in_queue}} AND n.ordering_key = j.waiting
    ORDER BY n.sequence"""

# Keys that are both in the index of key queues and in the index of parking rows. Each jump goes to the next key of one
# index, and from there to the next key of the other index that is not smaller. So if either index has few keys, few
# jumps are needed. A jump takes two rows of the recursion. MySQL: mysql/ordering.py.
PARKED = Query(
    f"""
WITH RECURSIVE jump(blocked_name, dead_name, number, waiting, parking) AS (
  SELECT w.blocked_name, w.dead_name, 0, CAST(NULL AS TEXT), CAST('' AS TEXT)
  FROM {{rows :pairs w blocked_name text, dead_name text}}
  UNION ALL
  SELECT blocked_name, dead_name, number + 1,
    CASE WHEN number % 2 = 1 THEN waiting
      WHEN waiting = parking THEN {_next_waiting("> jump.waiting")} ELSE {_next_waiting(">= jump.parking")} END,
    CASE WHEN number % 2 = 0 THEN parking ELSE (SELECT CAST(n.ordering_key AS TEXT) FROM {_PARKED}
      WHERE n.namespace = :namespace AND n.handler_name = jump.dead_name AND {_IN_PARKED}
        AND n.ordering_key >= jump.waiting
      {_IN_ORDER} LIMIT 1) END
  FROM jump
  WHERE parking IS NOT NULL AND (waiting IS NOT NULL OR number = 0) AND number < 2 * {MAX_JUMPS}
)
SELECT j.dead_name, d.ordering_key, d.id, d.event_id, d.updated_date, (
  SELECT count(*) FILTER (WHERE n.state = 'BLOCKED') FROM (SELECT n.state {_WAITING} LIMIT {MAX_BLOCKED}) n)
FROM jump j {{join}} {{table event_notifications primary d}} ON d.id = (
  SELECT n.id FROM {_PARKED}
  WHERE n.namespace = :namespace AND n.handler_name = j.dead_name AND {_IN_PARKED} AND n.ordering_key = j.waiting
  ORDER BY n.sequence LIMIT 1)
WHERE j.number > 0 AND j.number % 2 = 0 AND j.waiting = j.parking AND (
  SELECT CASE WHEN n.sequence > d.sequence THEN n.state END {_WAITING} LIMIT 1) = 'BLOCKED'
LIMIT :most
""",
    ParkedKey,
    mysql="",
)

# --- undelivered events ----------------------------------------------------------------------------

_EVENTS = """FROM {table events events_undelivered e}
    WHERE e.namespace = :namespace AND e.delivered = FALSE AND e.event_type IS NOT NULL AND e.event_type"""
TYPES = Jumps(f"SELECT e.event_type {_EVENTS} > :start ORDER BY e.event_type LIMIT 1")
UNDELIVERED = Query(
    f"""
SELECT :name, (SELECT count(*) FROM (SELECT 1 {_EVENTS} = :name ORDER BY e.sequence LIMIT :most) c), (
  SELECT CASE WHEN e.available_at > e.event_date THEN e.available_at ELSE e.event_date END
  FROM (SELECT e.event_date, e.available_at, e.sequence {_EVENTS} = :name ORDER BY e.sequence LIMIT :among) e
  WHERE e.available_at IS NULL OR e.available_at <= :now ORDER BY e.sequence LIMIT 1)
""",
    tuple[str, int, datetime | None],
    each="name text",
)

# --- the probes ------------------------------------------------------------------------------------


class Probes:
    """Reads the figures.

    ``most``: the largest number of entries to read for each handler name or event type. A count equal to ``most`` means
    "``most`` or more".
    """

    def __init__(self, port: Port) -> None:
        self._port = port

    async def due(self, namespace: str, slots: Sequence[Slot], now: datetime, most: int) -> list[DueFigures]:
        """Return the figures of the rows in these slots, by stored handler name.

        ``oldest_due`` is exact. Deferred rows do not count. With a bound of at most 10,000, ``retrying`` is estimated
        from the first 500 rows that are due later.
        """
        partitions = _partitions_of(slots)
        pairs = [{"name": name, "number": number} for name, numbers in partitions.items() for number in numbers]
        if not pairs:
            return []
        ends = await self._port.fetch(ENDS, namespace=namespace, slots=pairs)
        oldest = {name: first for name, first, _ in ends if first is not None and first <= now}
        counted = [
            {"name": name, "partitions": partitions[name]}
            for name, _, last in ends
            if name in oldest or (last is not None and last > now)
        ]
        far = now + FAR
        sampled = min(most, SAMPLED) if most <= MAX_SAMPLED_BOUND else most
        scope = {
            "now": now, "near": far - MICROSECOND, "far": far, "first_deferred": FIRST_DEFERRED, "most": most,
            "sampled": sampled,
        }  # fmt: skip
        counts = await self._port.fetch_each(COUNT_DUE, counted, namespace=namespace, **scope)
        rows = {row[0]: row for row in counts}
        found = [rows.get(name, (name, 0, 0, 0, 0, 0)) for name in partitions]
        return [
            DueFigures(
                name, due, min(most, later + far), oldest.get(name), far=far,
                retrying=round(later * retrying / sample) if sample else 0,
            )
            for name, due, later, sample, retrying, far in found
        ]  # fmt: skip

    async def failing(self, namespace: str, slots: Sequence[Slot], before: datetime, most: int) -> list[UUID]:
        """Return up to ``most`` failed rows of each stored handler name that first became due before a time.

        Only the rows that are due first are examined, about 10,000 over all names.
        """
        each = [{"name": name, "partitions": partitions} for name, partitions in _partitions_of(slots).items()]
        among = max(most, MAX_EXAMINED // max(1, len(each)))
        scope = {"start": FIRST_POSITION[0], "first_deferred": FIRST_DEFERRED, "among": among, "most": most}
        rows = await self._port.fetch_each(FAILING, each, namespace=namespace, before=before, **scope)
        return [id for _, id in rows]

    async def blocked(self, namespace: str, names: Sequence[str], most: int) -> dict[str, Counted]:
        """Count the BLOCKED rows of each stored handler name.

        Where BLOCKED rows share an index with other rows of key queues, these are read too, so an incomplete count may
        be small.
        """
        each = _each(await self._port.fetch(WITH_QUEUE, namespace=namespace, names=_each(names))) if names else []
        rows = await self._port.fetch_each(COUNT_BLOCKED, each, namespace=namespace, most=most)
        counts = {name: Counted(number, entries < most) for name, number, entries in rows}
        return {name: counts.get(name, Counted(0, True)) for name in names}

    async def dead_names(self, namespace: str) -> list[str]:
        """Return the stored handler names with DEAD or EXPIRED rows, by jumps along the index."""
        return await self._port.fetch(DEAD_NAMES, namespace=namespace)

    async def dead(self, namespace: str, names: Sequence[str], since: datetime, most: int) -> list[DeadFigures]:
        """Return the figures of each stored handler name. Rows that ended at or after ``since`` are recent."""
        newest = dict(await self._port.fetch(NEWEST_DEAD, namespace=namespace, names=_each(names))) if names else {}
        each = _each([name for name, date in newest.items() if date is not None])
        scope = {"namespace": namespace, "since": since, "most": most}
        rows = {row[0]: row for row in await self._port.fetch_each(COUNT_DEAD, each, **scope)}
        found = [rows.get(name, (name, 0, 0)) for name in names]
        return [DeadFigures(name, number, recent, newest.get(name)) for name, number, recent in found]

    async def parked(self, namespace: str, handlers: Sequence[Sequence[str]], most: int) -> list[ParkedKey]:
        """Return up to ``most`` parked keys: a DEAD or EXPIRED row precedes the first unfinished row, which is BLOCKED.

        ``handlers``: the stored handler names of each ordered handler. At most 1,000 keys of a handler name are
        examined.
        """
        pairs = [{"blocked_name": one, "dead_name": two} for names in handlers for one in names for two in names]
        return await self._port.fetch(PARKED, namespace=namespace, pairs=pairs, most=most) if pairs else []

    async def undelivered(self, namespace: str, now: datetime, most: int) -> dict[str, Waiting]:
        """Count the undelivered events of each event type, by jumps along the index.

        ``oldest`` is the time since which the first event, by sequence, has waited: when it was emitted or became
        available, whichever is later. Events that become available after ``now`` do not wait; ``None`` if no counted
        event waits.
        """
        found, unknown = dict[str, Waiting](), await self._port.fetch(TYPES, namespace=namespace)
        for among in (1, most):  # MySQL reads all events of the inner LIMIT
            scope = {"namespace": namespace, "now": now, "most": most, "among": among}
            rows = await self._port.fetch_each(UNDELIVERED, _each(unknown), **scope)
            found |= {name: Waiting(number, oldest) for name, number, oldest in rows}
            unknown = [name for name, number, oldest in rows if oldest is None and number > 1]
        return found


def _each(names: Sequence[str]) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


def _partitions_of(slots: Iterable[Slot]) -> dict[str, list[int]]:
    """Return the partitions of each name."""
    partitions: dict[str, list[int]] = {}
    for name, partition in slots:
        partitions.setdefault(name, []).append(partition)
    return partitions
