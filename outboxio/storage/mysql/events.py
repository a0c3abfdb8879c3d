"""The ``events`` table on MySQL and MariaDB."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.event import EventRecord
from outboxio.handover import Handover
from outboxio.ids import uuid7
from outboxio.storage.dedicated import STATEMENT_TIMEOUT
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import (
    Arguments,
    Dedicated,
    execute,
    execute_each,
    fetch_each,
    id_list,
    quiet_cursor,
)
from outboxio.storage.mysql.driver import driver_of
from outboxio.storage.mysql.flavour import Server, in_both
from outboxio.storage.mysql.notifications import FEW_MADE, FEWEST_MADE, JUST_MADE, JUST_MADE_FEW, as_notifications
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import FannedOut

# Indexes are named everywhere: with statistics from when the table was small the planner would scan it for ever.
_BY_TYPE = "eventlog.events e FORCE INDEX (events_undelivered)"
_BY_TOPIC = "eventlog.events e FORCE INDEX (events_undelivered_topic)"
_BY_ID = "eventlog.events e FORCE INDEX (PRIMARY)"

# Every live subscription, not only those of this process, so that an old version that fans out serves the handlers of
# a newer one; and the types and topics among them that have undelivered events. An idle poll is this one message. A
# row is one value, for the driver is slow at columns; to make all rows one, MariaDB would need a table in a file.
# EXISTS would be turned into a join, which a planner that believes the table to be empty begins with the backlog.
_LIVE = "eventlog.subscriptions s WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s"
_TYPE_WAITS = f"""(SELECT 1 FROM {_BY_TYPE}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type = t.event_type LIMIT 1)"""
_TOPIC_WAITS = f"""(SELECT 1 FROM {_BY_TOPIC}
  WHERE e.namespace = %(namespace)s AND e.waiting_topic = t.topic LIMIT 1)"""
_SUBSCRIPTIONS = f"""
SELECT JSON_ARRAY(s.handler_name, s.event_type, s.topic, s.priority, s.ordered,
  CAST(s.aliases AS CHAR) {{collate}}, CAST(s.last_seen_date AS CHAR) {{collate}}) FROM {_LIVE}
"""
SUBSCRIPTIONS = in_both(_SUBSCRIPTIONS.replace("%(namespace)s", "%s").replace("%(seen_since)s", "%s"))
FIND_WANTED = in_both(f"""
{_SUBSCRIPTIONS};
SELECT JSON_ARRAYAGG(t.event_type) FROM (SELECT DISTINCT s.event_type FROM {_LIVE} AND s.topic = ''{{but}}) t
WHERE {_TYPE_WAITS} = 1
UNION ALL
SELECT JSON_ARRAYAGG(t.topic) FROM (SELECT DISTINCT s.topic FROM {_LIVE} AND s.topic <> ''{{but}}) t
WHERE {_TOPIC_WAITS} = 1
""")

# A claim is put together of these, one for each key, which walks its key by itself along the index. All together they
# are one row of one column, for the driver is slow at rows and columns; an aggregate for each key would be a table of
# its own, and with 200 keys these took half of fan-out. What is found by its type and by its topic is taken once.
#
# Where no order is wanted, fan-out never waits for somebody else's transaction. A read without locks does not, and
# MariaDB can be told not to when the events are marked: only if that fails are they claimed past those that are locked,
# for a while. To lock the newest entries of an index, among which producers are at work, takes it several times as
# long. MySQL waits for a second at least, so there they are always claimed in this way. Then each branch sees what is
# committed by the time it runs: of two events of one ordering key, an earlier branch can miss the first, and a later
# one see the second. So the keys that ordered handlers want are never locked, which in one statement is one view of
# them all. What is found by its type and is on a topic that ordered handlers want, or the other way round, is marked
# with a minus: it is not taken here.
#
# Below what was reached lie events that are delivered, whose entries in the index stay for as long as any transaction
# may still want them: a backlog is read on from there. Where all columns are in the index, MySQL may walk it from its
# beginning rather than from there; `hops` is not in it.
CLAIM = """
SELECT GROUP_CONCAT(b.number, ' ', b.sequence, ' ', b.id) FROM ({branches}) b
"""
_OF_TYPE = f"FROM {_BY_TYPE} WHERE e.namespace = %s AND e.delivered = FALSE AND e.event_type = %s"
_OF_TOPIC = f"FROM {_BY_TOPIC} WHERE e.namespace = %s AND e.waiting_topic = %s"
_FIRST = "ORDER BY e.sequence LIMIT %s"
_READ = "SELECT %s AS number, e.id AS id, e.sequence AS sequence, 0 AS hops"
_READ_ON = _READ.replace("0 AS", "e.hops AS")
_MARKING = _READ.replace("e.id", "IF({other} IN ({{others}}), CONCAT('-', e.id), e.id)")
OF_TYPE, OF_TOPIC = f"{_READ} {_OF_TYPE} {_FIRST}", f"{_READ} {_OF_TOPIC} {_FIRST}"
OF_TYPE_AFTER = f"{_READ_ON} {_OF_TYPE} AND e.sequence > %s {_FIRST}"
OF_TOPIC_AFTER = f"{_READ_ON} {_OF_TOPIC} AND e.sequence > %s {_FIRST}"
OF_TYPE_MARKING = OF_TYPE.replace(_READ, _MARKING.format(other="e.topic"))
OF_TOPIC_MARKING = OF_TOPIC.replace(_READ, _MARKING.format(other="e.event_type"))
PAST_LOCKED = " FOR UPDATE SKIP LOCKED"
PAST_LOCKED_FOR = 60.0  # seconds, after something was locked

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

# The subscriptions as they were read behind the claim: whoever has subscribed before an event was committed gets it.
# DISTINCT makes a table of them, and both servers hash the one that is joined first: the subscriptions, which are few
# and narrow. A batch of events would not fit into the buffer for it, and a list would be walked for each of them.
_SUBSCRIBED = """
WITH subscribed AS (
  SELECT DISTINCT * FROM JSON_TABLE(%(subscribed)s, '$[*]' COLUMNS (
    handler_name {text} PATH '$[0]', event_type {text} PATH '$[1]', topic {text} PATH '$[2]', priority INT PATH '$[3]',
    ordered INT PATH '$[4]')) listed)
"""
_NOTIFY_BY_TYPE = f"""
{{hashing}} {_INTO.lstrip()}
{_SUBSCRIBED}
{_OWED}
FROM subscribed s STRAIGHT_JOIN {_BY_ID} ON e.event_type = s.event_type AND s.topic = ''
WHERE e.id IN ({{ids}})
"""
NOTIFY_BY_TYPE = in_both(f"{_NOTIFY_BY_TYPE} {_ONCE}")

# A handler that is reached both ways still gets one row.
NOTIFY = in_both(f"""
{_NOTIFY_BY_TYPE}
UNION ALL
{_OWED}
FROM (SELECT * FROM subscribed WHERE topic <> '') s STRAIGHT_JOIN {_BY_ID} ON e.topic = s.topic
WHERE e.id IN ({{ids}})
{_ONCE}
""")

_MARK_DELIVERED = f"UPDATE {_BY_ID} SET e.delivered = TRUE WHERE e.id IN ({{ids}})"
MARK_DELIVERED, MARK_UNLESS_LOCKED = in_both(_MARK_DELIVERED), in_both(f"{{unwaiting}} {_MARK_DELIVERED}")

# Events that this process has just committed are claimed by their ids, and all that follows is in the same message. So
# nothing can be decided in between: an event is marked if rows were made of it, and none are made if somebody wants
# events in order, or has another name, of which the long way knows more.
CLAIM_COMMITTED = f"SELECT e.id FROM {_BY_ID} WHERE e.id IN ({{ids}}) AND e.delivered = FALSE FOR UPDATE NOWAIT"
NOTIFY_COMMITTED = f"""
{_INTO.strip()}
{_OWED.strip()}
FROM {_BY_ID} STRAIGHT_JOIN {_LIVE}
  AND (e.event_type = s.event_type AND s.topic = '' OR e.topic = s.topic AND s.topic <> '')
  AND e.id IN ({{ids}}) AND e.delivered = FALSE
  AND NOT EXISTS (SELECT 1 FROM {_LIVE} AND (s.ordered OR JSON_LENGTH(s.aliases) > 0))
{_ONCE}
"""
MARK_COMMITTED = f"""
{_MARK_DELIVERED} AND e.delivered = FALSE AND EXISTS (
  SELECT 1 FROM eventlog.event_notifications n FORCE INDEX (event_notifications_event)
  WHERE n.event_id = e.id AND n.created_date = %(now)s)
"""

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
MOST_GUESSED = 8  # keys that are claimed without a look
BUSY_AFTER = 2  # rounds that have found events, one after the other
MOST_AT_ONCE = 64  # keys that one statement claims from; to plan more of its parts takes longer than to read the rows
MOST_READ_ON = 64  # keys, for with hundreds of them it costs more to remember where each was reached than it spares
BYTES_OF_EVENT = 100  # that a message at most has of an event: its id, twice
BACKFILL = f"""
{_INTO}
{_OWED}
FROM {_BY_ID} JOIN eventlog.subscriptions s ON s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
  AND (s.event_type = e.event_type OR (s.topic = e.topic AND s.topic <> ''))
WHERE e.id IN ({{ids}})
{_ONCE}
"""


NOTHING_DONE = FannedOut({}, frozenset(), 0)


class _Subscription(Struct, frozen=True, array_like=True):
    """A handler that wants a type, or a topic, as ``FIND_WANTED`` writes it."""

    handler_name: str
    event_type: str
    topic: str
    priority: int
    ordered: int
    aliases: str
    seen: str

    @property
    def key(self) -> tuple[str, str]:
        return ("#", self.topic) if self.topic else ("", self.event_type)


class _Batch(Struct, frozen=True):
    """Events of one key, which a claim has found."""

    sequences: list[int]
    ids: list[str]


class _Key(Struct, frozen=True):
    """An event type, or a topic, which has the sign ``#``, that somebody wants."""

    sign: str
    value: str
    is_ordered: bool
    waits: bool

    @property
    def name(self) -> str:
        """As :class:`FannedOut` calls it."""
        return f"{self.sign}{self.value}"


_subscriptions = msgspec.json.Decoder(list[_Subscription]).decode
_strings = msgspec.json.Decoder(list[str]).decode


class MysqlEvents:
    def __init__(self, fanout: Dedicated, admin: Dedicated, server: Server) -> None:
        self._fanout = fanout
        self._admin = admin
        self._server = server
        self._likely: list[_Key] = []
        """Where events were last, if nobody wants any in order."""
        self._last_turn: _Key | None = None
        """The key that was claimed from last, where they take turns."""
        self._has_guessed = False
        self._by_id = False
        self._in_a_row = 0
        """How many rounds have found events, one after the other."""
        self._known: Sequence[_Subscription] = ()
        """The subscriptions, as they were read last."""
        self._past_locked_until = float("-inf")

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
        guessed = self._guessed(after or {}, expected=expected)
        if guessed:
            done = NOTHING_DONE
            # The round after one by ids sees to what others have committed.
            self._by_id = bool(committed) and not self._by_id
            if self._by_id and handover is not None:
                done = await self._take_committed(namespace, now, seen_since, committed, handover)
            if not done.events:
                sizes = self._sizes(guessed, rooms, batch_size)
                done = await self._take(namespace, now, seen_since, sizes, (), after or {}, handover)
                looked_at = frozenset(key.name for key in guessed)
                done = FannedOut(done.events, done.full, done.notifications, done.reached, looked_at)
            if done.events:
                self._in_a_row += 1
                return done
            after = {}  # there it was looked
        self._by_id = False  # whatever others have committed is seen now
        done = await self._look_and_take(namespace, now, seen_since, rooms, batch_size, after or {}, handover)
        self._in_a_row = self._in_a_row + 1 if done.events else 0
        return done

    def _guessed(self, after: Mapping[str, int], *, expected: bool) -> Sequence[_Key]:
        """Keys that probably have events: to find out which have takes as long as all the rest of a small round.

        What is expected is probably where events were last, or even known; if it is not, or next time, all are looked
        at. And where round after round has found some, the next one will: all keys are claimed from, if they are few.
        """
        if self._in_a_row >= BUSY_AFTER and not any(s.ordered for s in self._known):
            keys = dict.fromkeys(s.key for s in self._known)
            if len(keys) <= MOST_GUESSED:
                return [_Key(*key, is_ordered=False, waits=True) for key in keys]
        self._has_guessed = expected and not after and not self._has_guessed and bool(self._likely)
        return self._likely if self._has_guessed else ()

    async def _look_and_take(
        self,
        namespace: str,
        now: datetime,
        seen_since: datetime,
        rooms: Mapping[str, int],
        batch_size: int,
        after: Mapping[str, int],
        handover: Handover | None,
    ) -> FannedOut:
        """Find out which keys have events, and claim some of each."""
        wanted = await self._wanted(self._fanout, namespace, seen_since, after)
        waiting = [key for key in wanted if key.waits]
        ordered = [key for key in wanted if key.is_ordered]
        if ordered:
            self._likely = []
        elif waiting:
            self._likely = waiting[:MOST_GUESSED]
        if not waiting:  # most rounds find nothing
            return NOTHING_DONE
        # One of these waits: then all are looked at, for by now others may have something that comes before it.
        if any(key.waits for key in ordered):
            waiting += [key for key in ordered if not key.waits]
        if ordered or len(waiting) <= MOST_AT_ONCE:
            sizes = self._sizes(waiting, rooms, batch_size)
            return await self._take(namespace, now, seen_since, sizes, ordered, after, handover)
        keys = self._in_turn(waiting)
        widened = {key.name: rooms[key.name] * len(waiting) // len(keys) for key in keys if key.name in rooms}
        sizes = self._sizes(keys, widened, batch_size)
        done = await self._take(namespace, now, seen_since, sizes, (), {}, handover)
        if not done.events:  # all that they have is locked
            return done
        looked_at = frozenset(key.name for key in keys)
        full = done.full | {key.name for key in waiting} - looked_at
        return FannedOut(done.events, full, done.notifications, looked_at=looked_at)

    def _in_turn(self, waiting: Sequence[_Key]) -> Sequence[_Key]:
        """Those of many keys whose turn it is: the next ones behind the last."""
        places = sorted(waiting, key=_place)
        last = self._last_turn
        behind = 0 if last is None else bisect_right(places, _place(last), key=_place)
        keys = (places[behind:] + places[:behind])[:MOST_AT_ONCE]
        self._last_turn = keys[-1]
        return keys

    async def _take(
        self,
        namespace: str,
        now: datetime,
        seen_since: datetime,
        sizes: Mapping[_Key, int],
        ordered: Sequence[_Key],
        after: Mapping[str, int],
        handover: Handover | None,
    ) -> FannedOut:
        """Claim events of these keys, and make their notifications."""
        is_read_on = not ordered and len(sizes) <= MOST_READ_ON
        moment = asyncio.get_running_loop().time()
        can_refuse = self._server.flavour.can_refuse_to_wait and not ordered
        past_locked = not can_refuse or moment < self._past_locked_until

        async def claim_and_notify(connection: Any, begin: str, commit: str, *, past_locked: bool) -> FannedOut:
            claim, args = _claim(namespace, sizes, ordered, after if is_read_on else {}, past_locked=past_locked)
            look = self._server.spell(SUBSCRIPTIONS)
            ((text,),), live = await fetch_each(connection, f"{begin}; {claim}; {look}", (*args, namespace, seen_since))
            subscribed = self._known = _subscribed(live)
            found = _by_key(text, sizes)
            claimed, full = _shared_out(found, sizes)
            if any(s.ordered for s in subscribed) and not ordered:
                # Somebody has just come who wants some in order: the next round looks for them in another way.
                claimed, full = {}, set(sizes)
            wanted = {s.key for s in subscribed}
            claimed = {key: ids for key, ids in claimed.items() if ids and (key.sign, key.value) in wanted}
            made = 0
            if claimed:
                made = await self._write(connection, claimed, subscribed, now, commit, handover, are_locked=past_locked)
            else:
                await execute(connection, commit)
            return FannedOut(
                events={key.name: len(ids) for key, ids in claimed.items()},
                full=frozenset(key.name for key in full),
                notifications=made,
                reached={key.name: max(batch.sequences) for key, batch in found.items() if batch.ids and is_read_on},
            )

        done: FannedOut
        try:
            done = await self._fanout.in_transaction_of(partial(claim_and_notify, past_locked=past_locked))
        except Exception as error:
            if past_locked or errors.number(error) != errors.LOCKED:
                raise
            self._past_locked_until = moment + PAST_LOCKED_FOR
            done = await self._fanout.in_transaction_of(partial(claim_and_notify, past_locked=True))
        return done

    async def _write(
        self,
        connection: Any,
        claimed: Mapping[_Key, Sequence[str]],
        subscribed: Sequence[_Subscription],
        now: datetime,
        commit: str,
        handover: Handover | None,
        *,
        are_locked: bool,
    ) -> int:
        """Make the notifications of claimed events, mark these and commit, in one message; how many it makes.

        Rows are handed over before their events are marked, unless somebody may have locked these.
        """
        events = [event_id for ids in claimed.values() for event_id in ids]
        ids = id_list(events)
        notify, values = self._notify(ids, subscribed, claimed, now)
        mark = self._server.spell(MARK_DELIVERED if are_locked else MARK_UNLESS_LOCKED).replace("{ids}", ids)
        if handover is None:
            made, *_ = await execute_each(connection, f"{notify}; {mark}; {commit}", values)
            return made
        just_made, names = _just_made(ids, len(events), handover, self._server)
        steps = (notify, just_made, mark) if are_locked else (notify, mark, just_made)
        message = "; ".join((*steps, commit))
        (made, *_), _ = await execute_handing_over(connection, message, values | names, handover)
        return made

    async def _take_committed(
        self,
        namespace: str,
        now: datetime,
        seen_since: datetime,
        committed: Sequence[EventRecord],
        handover: Handover,
    ) -> FannedOut:
        """Make the notifications of known events, in one message; of none that somebody has locked."""
        keys = _keys_of(committed, self._known)
        if not keys:
            return NOTHING_DONE
        ids = id_list(keys)
        claim, notify, mark = (text.format(ids=ids) for text in (CLAIM_COMMITTED, NOTIFY_COMMITTED, MARK_COMMITTED))
        just_made, names = _just_made(ids, len(keys), handover, self._server)
        values = {**names, "namespace": namespace, "seen_since": seen_since, "now": now, "id_head": _id_head()}

        async def claim_and_notify(connection: Any, begin: str, commit: str) -> FannedOut:
            message = f"{begin}; {claim}; {notify}; {just_made}; {mark}; {commit}"
            (made, marked, *_), (claimed,) = await execute_handing_over(connection, message, values, handover, looks=1)
            # What lost its last handler a moment ago was claimed and is not marked: the number is right, at least.
            events = Counter(keys[event_id] for (event_id,) in claimed[:marked])
            return FannedOut(dict(events), frozenset(), made, looked_at=frozenset(keys.values()))

        try:
            done: FannedOut = await self._fanout.in_transaction_of(claim_and_notify)
        except Exception as error:
            if errors.number(error) not in (errors.LOCKED, errors.MAY_NOT_WAIT):
                raise
            return NOTHING_DONE
        return done

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        wanted = await self._wanted(self._admin, namespace, seen_since, {})
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

    async def _wanted(
        self, on: Dedicated, namespace: str, seen_since: datetime, after: Mapping[str, int]
    ) -> list[_Key]:
        """The keys that wait, and those that ordered handlers want.

        Those of a backlog, of which something was reached, need not be looked at: they have more.
        """
        reached = {f"reached{number}": name for number, name in enumerate(after)}
        names = ", ".join(f"%({name})s" for name in reached)
        but = f" AND CONCAT(IF(s.topic = '', '', '#'), s.event_type, s.topic) NOT IN ({names})" if reached else ""
        live, ((types,), (topics,)) = await on.fetch_each(
            {dialect: text.replace("{but}", but) for dialect, text in FIND_WANTED.items()},
            {"namespace": namespace, "seen_since": seen_since, **reached},
        )
        subscribed = _subscribed(live)
        waiting = {("", name) for name in _strings(types or "[]")} | {("#", name) for name in _strings(topics or "[]")}
        waiting |= {subscription.key for subscription in subscribed if "".join(subscription.key) in after}
        ordered = {subscription.key for subscription in subscribed if subscription.ordered}
        wanted = dict.fromkeys(subscription.key for subscription in subscribed)
        return [_Key(*key, key in ordered, key in waiting) for key in wanted if key in ordered or key in waiting]

    def _sizes(self, keys: Sequence[_Key], rooms: Mapping[str, int], batch_size: int) -> dict[_Key, int]:
        """How many to take of each key; those that were never found share a batch. What is of a type comes first.

        Never more than the server takes in one message.
        """
        share = max(1, batch_size // max(1, sum(key.waits and key.name not in rooms for key in keys)))
        most = max(1, self._server.largest_packet // (BYTES_OF_EVENT * len(keys)))
        return {key: min(most, rooms.get(key.name, share)) for key in sorted(keys, key=lambda key: key.sign)}

    def _notify(
        self, ids: str, subscribed: Sequence[_Subscription], claimed: Iterable[_Key], now: datetime
    ) -> tuple[str, dict[str, Any]]:
        """The statement that makes the notifications of claimed events, and its arguments."""
        notify = NOTIFY
        if not any(subscription.topic for subscription in subscribed):
            notify, types = NOTIFY_BY_TYPE, {key.value for key in claimed}
            subscribed = [subscription for subscription in subscribed if subscription.event_type in types]
        listed = as_json((s.handler_name, s.event_type, s.topic, s.priority, s.ordered) for s in subscribed)
        return self._server.spell(notify).replace("{ids}", ids), {
            "subscribed": listed, "now": now, "id_head": _id_head(),
        }  # fmt: skip


def _place(key: _Key) -> tuple[str, str]:
    return key.sign, key.value


def _subscribed(found: Iterable[tuple[str]]) -> Sequence[_Subscription]:
    """Those of the live subscriptions that get new rows: a name that is a live handler's alias does not.

    Of two names that are each other's alias, after a rename was taken back, the one that was seen earlier does not.
    """
    live = _subscriptions(f"[{','.join([text for (text,) in found])}]")
    newest: dict[tuple[str, str], str] = {}
    for s in live:
        for alias in _strings(s.aliases) if s.aliases != "[]" else ():
            newest[s.handler_name, alias] = max(s.seen, newest.get((s.handler_name, alias), ""))
    replaced = {
        alias for (name, alias), seen in newest.items() if (newest.get((alias, name), ""), alias) <= (seen, name)
    }
    return [s for s in live if s.handler_name not in replaced]


def _keys_of(events: Iterable[EventRecord], subscribed: Sequence[_Subscription]) -> dict[str, str]:
    """The ids of events that somebody wants, with the name of the key by which they are found first."""
    wanted = {s.key for s in subscribed}
    keys: dict[str, str] = {}
    for event in events:
        if event.event_type is not None and ("", event.event_type) in wanted:
            keys[str(event.id)] = event.event_type
        elif event.topic is not None and ("#", event.topic) in wanted:
            keys[str(event.id)] = f"#{event.topic}"
    return keys


def _claim(
    namespace: str,
    sizes: Mapping[_Key, int],
    ordered: Sequence[_Key],
    after: Mapping[str, int],
    *,
    past_locked: bool,
) -> tuple[str, tuple[Any, ...]]:
    """The statement that claims a batch of each key, and its arguments."""
    branches: list[str] = []
    args: list[Any] = []
    for number, (key, size) in enumerate(sizes.items()):
        others = [other.value for other in ordered if not key.is_ordered and other.sign != key.sign]
        locked = PAST_LOCKED if past_locked and not key.is_ordered else ""
        branches.append(f"({_branch(key, others, is_read_on=key.name in after)}{locked})")
        behind = [after[key.name]] if key.name in after else []
        args += [number, *others, namespace, key.value, *behind, size]
    return CLAIM.format(branches=" UNION ALL ".join(branches)), tuple(args)


def _branch(key: _Key, others: Sequence[str], *, is_read_on: bool) -> str:
    """What looks for a batch of one key. ``others``: what ordered handlers want of the other kind."""
    if others and not key.is_ordered:
        marking = OF_TOPIC_MARKING if key.sign else OF_TYPE_MARKING
        return marking.format(others=", ".join(["%s"] * len(others)))
    if is_read_on:
        return OF_TOPIC_AFTER if key.sign else OF_TYPE_AFTER
    return OF_TOPIC if key.sign else OF_TYPE


def _just_made(ids: str, events: int, handover: Handover, server: Server) -> tuple[str, dict[str, Any]]:
    """The statement that looks at the rows of so many events that may be handed over, and its arguments."""
    names = {f"to{number}": name for number, name in enumerate(handover.names)}
    listed = ", ".join(f"%({name})s" for name in names)
    as_rows = events * len(names) <= (FEW_MADE if server.flavour.aggregates_in_files else FEWEST_MADE)
    return (JUST_MADE_FEW if as_rows else JUST_MADE).format(ids=ids, names=listed, most=handover.most), names


async def execute_handing_over(
    connection: Any, message: str, args: Arguments, handover: Handover, looks: int = 0
) -> tuple[list[int], list[list[tuple[Any, ...]]]]:
    """Run a message that makes rows and looks at them, behind other ``looks``.

    The number of rows that each statement behind those looks changes, and what they found.

    They are handed over when they are seen, and not when the server has answered the COMMIT behind: it waits for the
    disk. If it fails, all is as if a run's outcome had been lost: their events are fanned out again.
    """
    rows = driver_of(connection).rows
    async with asyncio.timeout(STATEMENT_TIMEOUT):
        cursor = quiet_cursor(connection)
        await cursor.execute(message, args)
        counts, found, has_more = list[int](), list[list[tuple[Any, ...]]](), True
        while has_more:
            if cursor.description is None:
                if len(found) == looks:
                    counts.append(int(cursor.rowcount))
            elif len(found) < looks:
                found.append(list(await rows(cursor)))
            else:
                handover.hand(as_notifications(await rows(cursor)) or ())
            has_more = await cursor.nextset()
    return counts, found


def _by_key(text: str | None, sizes: Mapping[_Key, int]) -> dict[_Key, _Batch]:
    """What a claim has found of each key."""
    found = {key: _Batch([], []) for key in sizes}
    batches = list(found.values())
    for event in text.split(",") if text else ():
        number, sequence, event_id = event.split(" ")
        batch = batches[int(number)]
        batch.sequences.append(int(sequence))
        batch.ids.append(event_id)
    return found


def _shared_out(found: Mapping[_Key, _Batch], sizes: Mapping[_Key, int]) -> tuple[dict[_Key, list[str]], set[_Key]]:
    """The ids that are taken of each key, and the keys that are full. An id is only the first key's that has it."""
    full = {key for key, batch in found.items() if len(batch.ids) >= sizes[key]}
    owners: dict[str, _Key] = {}
    ordered = {key: batch for key, batch in found.items() if key.is_ordered}
    horizon = min((max(batch.sequences) for key, batch in ordered.items() if key in full), default=None)
    for key, batch in ordered.items():
        taken = [
            event_id
            for sequence, event_id in zip(batch.sequences, batch.ids, strict=True)
            if horizon is None or sequence <= horizon
        ]
        for event_id in taken:
            owners.setdefault(event_id, key)
        if not taken:
            full.discard(key)
        elif len(taken) < len(batch.ids):
            full.add(key)
    for key in (key for key in found if key not in ordered):
        for event_id in found[key].ids:
            if not event_id.startswith("-"):
                owners.setdefault(event_id, key)
            elif event_id[1:] not in owners:
                full.add(key)

    claimed: dict[_Key, list[str]] = {key: [] for key in sizes}
    for event_id, key in owners.items():
        claimed[key].append(event_id)
    return claimed, full


def _id_head() -> str:
    """The time and the version of a UUIDv7."""
    return str(uuid7())[:15]
