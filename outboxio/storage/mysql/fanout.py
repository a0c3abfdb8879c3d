"""Fan-out on MySQL and MariaDB (decisions 1 and 9): find keys with events, claim events, create notifications, commit.

A round takes two or three messages:

1. ``FIND_UNDELIVERED_KEYS``: the live subscriptions, and the keys that have undelivered events. Most rounds end here. A
   round that guesses the keys (``claim_plan.py``) skips this message.
2. BEGIN, ``CLAIM`` and ``SUBSCRIPTIONS``: some events of each key, and the subscriptions. These are read after the
   claim, so a handler that was announced before an event was committed gets the event.
3. Create the notifications, read the rows for the handoff (``new_notifications.py``), mark the events, COMMIT.

Locks. A claim never waits for a transaction of your application:

* A plain claim reads without locks. On MariaDB, the UPDATE that marks the events fails immediately if a row is locked
  (``unwaiting``); after such a failure, claims skip locked events for 60 s. Locking the newest entries of an index,
  between which producers insert, takes several times as long as reading them.
* MySQL waits for a lock for at least 1 s. So claims on MySQL always skip locked events (SKIP LOCKED).
* Keys of ordered handlers are never locked. With SKIP LOCKED, each branch sees the rows that are committed when it
  runs: of two events of an ordering key, an earlier branch could miss the first, and a later branch see the second.
  Without locks, the statement reads all keys in a single snapshot. An event that is found by an unordered key, and also
  belongs to an ordered key, is marked with a minus, and left to the ordered key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from outboxio.storage.mysql import errors
from outboxio.storage.mysql.claim_plan import Claim, ClaimPlan, Key, Taken, keys_of, strings, subscribed
from outboxio.storage.mysql.connection import LoopConnection, execute, execute_each, fetch_each, id_list
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.mysql.new_notifications import (
    EVENTS_BY_ID,
    INTO,
    LIVE,
    LIVE_COUNTED,
    ONCE,
    SELECT,
    execute_with_handoff,
    find_just_made,
    id_head,
    take_committed,
)
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import FanoutRequest, FanoutResult

# All statements force an index: with statistics from when the table was small, the planner would scan the table.
BY_TYPE = "eventlog.events e FORCE INDEX (events_undelivered)"
_BY_TOPIC = "eventlog.events e FORCE INDEX (events_undelivered_topic)"

# A row is a single JSON value, because the driver decodes columns slowly. Aggregating all rows into one value would
# take an on-disk table on MariaDB. Subqueries are used instead of EXISTS, which would become a join: with outdated
# statistics, the planner would start it with the backlog.
_TYPE_WAITS = f"""(SELECT 1 FROM {BY_TYPE}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type = t.event_type LIMIT 1)"""
_TOPIC_WAITS = f"""(SELECT 1 FROM {_BY_TOPIC}
  WHERE e.namespace = %(namespace)s AND e.waiting_topic = t.topic LIMIT 1)"""
_SUBSCRIPTIONS = f"""
SELECT JSON_ARRAY(s.handler_name, s.event_type, s.topic, s.priority, s.ordered,
  CAST(s.aliases AS CHAR) {{collate}}, CAST(s.last_seen_date AS CHAR) {{collate}}, IFNULL(p.partitions, 1))
FROM {LIVE_COUNTED}
"""
SUBSCRIPTIONS = for_flavours(_SUBSCRIPTIONS.replace("%(namespace)s", "%s").replace("%(seen_since)s", "%s"))
FIND_UNDELIVERED_KEYS = for_flavours(f"""
{_SUBSCRIPTIONS};
SELECT JSON_ARRAYAGG(t.event_type) FROM (SELECT DISTINCT s.event_type FROM {LIVE} AND s.topic = ''{{but}}) t
WHERE {_TYPE_WAITS} = 1
UNION ALL
SELECT JSON_ARRAYAGG(t.topic) FROM (SELECT DISTINCT s.topic FROM {LIVE} AND s.topic <> ''{{but}}) t
WHERE {_TOPIC_WAITS} = 1
""")

# A claim has a branch for each key, which scans the index from the key's first event. All events are returned as a
# single value, because the driver decodes rows and columns slowly. An aggregate per key would need a temporary table
# per key, which took half of the time of a fan-out with 200 keys.
#
# Entries of delivered events stay in the index while any transaction may still read them. So a backlog is read from the
# sequence that was reached (``_AFTER``). There the SELECT includes `hops`, a column that is not in the index: with a
# covering index, MySQL may scan from the beginning.
CLAIM = """
SELECT GROUP_CONCAT(b.number, ' ', b.sequence, ' ', b.id) FROM ({branches}) b
"""
_OF_TYPE_WAITING = f"FROM {BY_TYPE} WHERE e.namespace = %s AND e.delivered = FALSE AND e.event_type = %s"
_OF_TOPIC_WAITING = f"FROM {_BY_TOPIC} WHERE e.namespace = %s AND e.waiting_topic = %s"
_FIRST = "ORDER BY e.sequence LIMIT %s"
_READ = "SELECT %s AS number, e.id AS id, e.sequence AS sequence, 0 AS hops"
_READ_ON = _READ.replace("0 AS", "e.hops AS")
_MARKING = _READ.replace("e.id", "IF({other} IN ({{others}}), CONCAT('-', e.id), e.id)")
OF_TYPE, OF_TOPIC = f"{_READ} {_OF_TYPE_WAITING} {_FIRST}", f"{_READ} {_OF_TOPIC_WAITING} {_FIRST}"
OF_TYPE_AFTER = f"{_READ_ON} {_OF_TYPE_WAITING} AND e.sequence > %s {_FIRST}"
OF_TOPIC_AFTER = f"{_READ_ON} {_OF_TOPIC_WAITING} AND e.sequence > %s {_FIRST}"
OF_TYPE_MARKING = OF_TYPE.replace(_READ, _MARKING.format(other="e.topic"))
OF_TOPIC_MARKING = OF_TOPIC.replace(_READ, _MARKING.format(other="e.event_type"))
SKIP_LOCKED = " FOR UPDATE SKIP LOCKED"

# DISTINCT materializes the subscriptions. Both servers hash the table that is joined first: the subscriptions, which
# are few and narrow. A batch of events would not fit into the join buffer, and without the table the list would be
# parsed once for each event.
_SUBSCRIBED = """
WITH subscribed AS (
  SELECT DISTINCT * FROM JSON_TABLE(%(subscribed)s, '$[*]' COLUMNS (
    handler_name {text} PATH '$[0]', event_type {text} PATH '$[1]', topic {text} PATH '$[2]', priority INT PATH '$[3]',
    ordered INT PATH '$[4]', partitions INT PATH '$[5]')) listed)
"""
_NOTIFY_BY_TYPE = f"""
{{hashing}} {INTO}
{_SUBSCRIBED}
{SELECT}
FROM subscribed s STRAIGHT_JOIN {EVENTS_BY_ID} ON e.event_type = s.event_type AND s.topic = ''
WHERE e.id IN ({{ids}})
"""
NOTIFY_BY_TYPE = for_flavours(f"{_NOTIFY_BY_TYPE} {ONCE}")

# A handler that subscribes to both the type and the topic of an event gets a single notification.
INSERT_NOTIFICATIONS = for_flavours(f"""
{_NOTIFY_BY_TYPE}
UNION ALL
{SELECT}
FROM (SELECT * FROM subscribed WHERE topic <> '') s STRAIGHT_JOIN {EVENTS_BY_ID} ON e.topic = s.topic
WHERE e.id IN ({{ids}})
{ONCE}
""")

_MARK_DELIVERED = f"UPDATE {EVENTS_BY_ID} SET e.delivered = TRUE WHERE e.id IN ({{ids}})"
MARK_DELIVERED, MARK_UNLESS_LOCKED = for_flavours(_MARK_DELIVERED), for_flavours(f"{{unwaiting}} {_MARK_DELIVERED}")

NOTHING_DONE = FanoutResult({}, frozenset(), 0)


class MysqlFanout:
    """Rounds of fan-out, on the connection of the fan-out loop."""

    def __init__(self, loop: LoopConnection, admin: LoopConnection, server: Server) -> None:
        self._loop = loop
        self._admin = admin
        self._server = server
        self.plan = ClaimPlan()

    async def fan_out(self, request: FanoutRequest) -> FanoutResult:
        plan, after = self.plan, request.after
        guessed = plan.guess(after, request.behind, expected=request.expected)
        if guessed:
            done = NOTHING_DONE
            if plan.takes_committed(request.committed) and request.handoff is not None:
                committed = keys_of(request.committed, plan.live)
                if committed:
                    taken = await take_committed(self._loop, self._server, request, committed, request.handoff)
                    done = taken or NOTHING_DONE
            if not done.events:
                done = await self._take(request, plan.claim_guessed(guessed, request, self._server.largest_packet))
            if plan.is_enough(done, request.behind):
                return done
            after = dict[str, int]()  # the guessed keys were already read from there
        keys = await find_undelivered_keys(self._loop, request.namespace, request.seen_since, after)
        claim = plan.claim(keys, request, after, self._server.largest_packet)
        done = NOTHING_DONE if claim is None else await self._take(request, claim)
        plan.ended(done)
        return done

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        keys = await find_undelivered_keys(self._admin, namespace, seen_since, {})
        return any(key.waits for key in keys)

    async def _take(self, request: FanoutRequest, claim: Claim) -> FanoutResult:
        """Claim events and create the notifications. If MariaDB finds a locked event, retry with SKIP LOCKED."""
        now = asyncio.get_running_loop().time()
        can_refuse = self._server.flavour.can_refuse_to_wait
        skips_locked = self.plan.skips_locked(claim, now, can_refuse_to_wait=can_refuse)
        try:
            return await self._claim_and_notify(request, claim, skips_locked=skips_locked)
        except Exception as error:
            if skips_locked or errors.number(error) != errors.LOCKED:
                raise
            self.plan.met_locked(now)
            return await self._claim_and_notify(request, claim, skips_locked=True)

    async def _claim_and_notify(self, request: FanoutRequest, claim: Claim, *, skips_locked: bool) -> FanoutResult:
        statement, args = claim_statement(claim, request.namespace, skips_locked=skips_locked)
        live_statement = self._server.sql_for(SUBSCRIPTIONS)
        async with self._loop.transaction() as (connection, begin, commit):
            ((text,),), live = await fetch_each(
                connection, f"{begin}; {statement}; {live_statement}",
                (*args, request.namespace, request.seen_since),
            )  # fmt: skip
            self.plan.live = subscribed(live)
            taken = claim.select_events(text, self.plan.live)
            if not taken.ids:
                await execute(connection, commit)
                return claim.result(taken, 0)
            message, values = self._message(taken, request, commit, are_locked=skips_locked)
            if request.handoff is None:
                made, *_ = await execute_each(connection, message, values)
            else:
                (made, *_), _ = await execute_with_handoff(connection, message, values, request.handoff)
            return claim.result(taken, made)

    def _message(
        self, taken: Taken, request: FanoutRequest, commit: str, *, are_locked: bool
    ) -> tuple[str, dict[str, Any]]:
        """Return the message that creates notifications for the claimed events, marks the events and commits.

        The handoff is read before the events are marked if the claim locked them. Otherwise it is read afterwards,
        because marking may still fail.
        """
        events = [event_id for ids in taken.ids.values() for event_id in ids]
        ids = id_list(events)
        notify, values = self._notify(ids, taken.ids, request)
        mark = self._server.sql_for(MARK_DELIVERED if are_locked else MARK_UNLESS_LOCKED).replace("{ids}", ids)
        if request.handoff is None:
            return f"{notify}; {mark}; {commit}", values
        just_made, names = find_just_made(ids, len(events), request.handoff, self._server)
        steps = (notify, just_made, mark) if are_locked else (notify, mark, just_made)
        return "; ".join((*steps, commit)), values | names

    def _notify(self, ids: str, claimed: Iterable[Key], request: FanoutRequest) -> tuple[str, dict[str, Any]]:
        """Return the statement that creates the notifications of the claimed events, and its arguments."""
        live = self.plan.live
        notify = INSERT_NOTIFICATIONS
        if not any(s.topic for s in live):
            notify, types = NOTIFY_BY_TYPE, {key.value for key in claimed}
            live = [s for s in live if s.event_type in types]
        listed = as_json((s.handler_name, s.event_type, s.topic, s.priority, s.ordered, s.partitions) for s in live)
        return self._server.sql_for(notify).replace("{ids}", ids), {
            "subscribed": listed, "now": request.now, "id_head": id_head(),
        }  # fmt: skip


async def find_undelivered_keys(
    on: LoopConnection, namespace: str, seen_since: datetime, after: Mapping[str, int]
) -> list[Key]:
    """Return the keys that have undelivered events, and all keys of ordered handlers.

    Keys in ``after`` are known to have a backlog, so they are not queried.
    """
    reached = {f"reached{number}": name for number, name in enumerate(after)}
    names = ", ".join(f"%({name})s" for name in reached)
    but = f" AND CONCAT(IF(s.topic = '', '', '#'), s.event_type, s.topic) NOT IN ({names})" if reached else ""
    live, ((types,), (topics,)) = await on.fetch_each(
        {dialect: text.replace("{but}", but) for dialect, text in FIND_UNDELIVERED_KEYS.items()},
        {"namespace": namespace, "seen_since": seen_since, **reached},
    )
    found = subscribed(live)
    waiting = {("", name) for name in strings(types or "[]")} | {("#", name) for name in strings(topics or "[]")}
    waiting |= {s.key for s in found if "".join(s.key) in after}
    ordered = {s.key for s in found if s.ordered}
    keys = dict.fromkeys(s.key for s in found)
    return [Key(*key, key in ordered, key in waiting) for key in keys if key in ordered or key in waiting]


def claim_statement(claim: Claim, namespace: str, *, skips_locked: bool) -> tuple[str, tuple[Any, ...]]:
    """Return the statement of a claim, and its arguments."""
    branches: list[str] = []
    args: list[Any] = []
    for number, (key, size) in enumerate(claim.sizes.items()):
        others = [other.value for other in claim.ordered if not key.is_ordered and other.sign != key.sign]
        locking = SKIP_LOCKED if skips_locked and not key.is_ordered else ""
        branches.append(f"({_branch(key, others, is_read_on=key.name in claim.after)}{locking})")
        behind = [claim.after[key.name]] if key.name in claim.after else []
        args += [number, *others, namespace, key.value, *behind, size]
    return CLAIM.format(branches=" UNION ALL ".join(branches)), tuple(args)


def _branch(key: Key, others: Sequence[str], *, is_read_on: bool) -> str:
    """Return the branch of a claim for a key. ``others``: the ordered topics for an event type, and vice versa."""
    if others and not key.is_ordered:
        marking = OF_TOPIC_MARKING if key.sign else OF_TYPE_MARKING
        return marking.format(others=", ".join(["%s"] * len(others)))
    if is_read_on:
        return OF_TOPIC_AFTER if key.sign else OF_TYPE_AFTER
    return OF_TOPIC if key.sign else OF_TYPE
