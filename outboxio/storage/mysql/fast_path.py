"""The fast path of fan-out: events that this process has just committed are claimed by id, in a single message.

The message makes the notifications, reads the rows for the handoff, marks the events and commits, so that no decision
is possible between the statements. The statements leave to the usual path (``fanout.py``):

* events that a foreign transaction has locked: the whole message fails (NOWAIT);
* all events, while a live handler is ordered or has aliases;
* events that no live handler wants: an event is marked only if a notification was made of the event.

The fast path saves 0.7 ms of the time of a single event (decision 16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from outboxio.model.notification import Handoff
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import LoopConnection, id_list
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.handoff import execute_handing_over, find_just_made
from outboxio.storage.mysql.new_notifications import BY_ID, INTO, LIVE, LIVE_COUNTED, ONCE, SELECT_COUNTED, id_head
from outboxio.storage.protocols import FanoutRequest, FanoutResult

CLAIM_COMMITTED = f"SELECT e.id FROM {BY_ID} WHERE e.id IN ({{ids}}) AND e.delivered = FALSE FOR UPDATE NOWAIT"
NOTIFY_COMMITTED = f"""
{INTO}
{SELECT_COUNTED}
FROM {BY_ID} STRAIGHT_JOIN {LIVE_COUNTED}
  AND (e.event_type = s.event_type AND s.topic = '' OR e.topic = s.topic AND s.topic <> '')
  AND e.id IN ({{ids}}) AND e.delivered = FALSE
  AND NOT EXISTS (SELECT 1 FROM {LIVE} AND (s.ordered OR JSON_LENGTH(s.aliases) > 0))
{ONCE}
"""
MARK_COMMITTED = f"""
UPDATE {BY_ID} SET e.delivered = TRUE WHERE e.id IN ({{ids}}) AND e.delivered = FALSE AND EXISTS (
  SELECT 1 FROM eventlog.event_notifications n FORCE INDEX (event_notifications_event)
  WHERE n.event_id = e.id AND n.created_date = %(now)s)
"""


async def take_committed(
    loop: LoopConnection, server: Server, request: FanoutRequest, keys: Mapping[str, str], handoff: Handoff
) -> FanoutResult | None:
    """Make the notifications of known events; ``None`` if a foreign transaction has locked any of the events.

    ``keys``: the ids of the events, each with the name of the key.
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
            (made, marked, *_), (claimed,) = await execute_handing_over(connection, message, values, handoff, reads=1)
    except Exception as error:
        if errors.number(error) not in (errors.LOCKED, errors.MAY_NOT_WAIT):
            raise
        return None
    # An event that has just lost the last handler is claimed and not marked. The total is right; the
    # split by key may count the wrong event.
    events = Counter(keys[event_id] for (event_id,) in claimed[:marked])
    return FanoutResult(dict(events), frozenset(), made, looked_at=frozenset(keys.values()))
