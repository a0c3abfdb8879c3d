"""The INSERTs of your application's transactions: events, as literals (decision 13), and received messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.errors import InvalidEvent
from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.columns import INSERT_EVENTS, values_of_action, values_of_event
from outboxio.storage.mysql.connection import ALL_ROWS, send
from outboxio.storage.mysql.flavour import Server, by_flavour, for_flavours
from outboxio.storage.mysql.values import Escape, as_json, as_timestamp, escape_of
from outboxio.storage.protocols import ConsumeResult

OVERHEAD = 128  # the most bytes of a message that are not rows: savepoints, COMMIT

# The most bytes of a statement with several rows. statement_timeout applies to each statement, and a packet could be a
# thousand times as large.
MAX_STATEMENT_SIZE = 2**20
_INSERT = INSERT_EVENTS.encode()


def insertions(
    action: ActionRecord, events: Sequence[EventRecord], escape: Escape, largest_packet: int
) -> Iterator[bytes]:
    """Return the statements that insert the events of an action: a single one, unless there are many rows."""
    shared = _literals(escape, values_of_action(action))
    return _statements(((action, event, shared) for event in events), escape, largest_packet)


def received_insertions(received: Sequence[ReceivedEvent], escape: Escape, largest_packet: int) -> Iterator[bytes]:
    """Return the same statements for events that each have their own action."""
    rows = ((action, event, _literals(escape, values_of_action(action))) for action, event in received)
    return _statements(rows, escape, largest_packet)


def _statements(
    events: Iterable[tuple[ActionRecord, EventRecord, str]], escape: Escape, largest_packet: int
) -> Iterator[bytes]:
    """Return the statements for events, each passed with its action and the literals of the action."""
    packet = largest_packet - OVERHEAD
    max_size = min(packet, MAX_STATEMENT_SIZE)
    rows: list[bytes] = []
    size = len(_INSERT)
    for action, event, shared in events:
        own = (*values_of_event(event), action.headers_of(event))
        row = f"({_literals(escape, own)}, {shared}, FALSE)".encode()
        if len(_INSERT) + len(row) >= packet:
            raise InvalidEvent(
                f"event {event.event_type or 'of ' + action.action_name}",
                f"its row has {len(row)} bytes with the action's parameters; the server's max_allowed_packet is "
                f"{largest_packet}: increase it, or store large values elsewhere",
            )
        if rows and size + len(row) + 2 >= max_size:
            yield _statement(rows)
            rows, size = [], len(_INSERT)
        rows.append(row)
        size += len(row) + 2
    yield _statement(rows)


def _statement(rows: Sequence[bytes]) -> bytes:
    return _INSERT + b",\n".join(rows)


def _literals(escape: Escape, values: Sequence[Any]) -> str:
    """Format values as SQL literals. The driver's own function takes three times as long."""
    return ", ".join([
        "NULL" if value is None
        else escape(value) if isinstance(value, str)
        else f"'{value}'" if isinstance(value, UUID)
        else f"'{as_timestamp(value)}'" if isinstance(value, datetime)
        else str(int(value))
        for value in values
    ])  # fmt: skip


async def insert_events(connection: Any, action: ActionRecord, events: Sequence[EventRecord], server: Server) -> None:
    """Insert the events of an action on the connection of a loop, in the open transaction."""
    messages = insertions(action, events, escape_of(connection), server.largest_packet)
    try:
        await send(connection, server, *messages)
    except Exception as error:
        if (refusal := refusal_of(error, action, server)) is not None:
            raise refusal from error
        raise


def refusal_of(error: Exception, action: ActionRecord, server: Server) -> InvalidEvent | None:
    """Return the error to raise if the server rejected the rows because of their size."""
    if errors.number(error) != errors.TOO_LARGE:
        return None
    return InvalidEvent(
        f"an event of {action.action_name}",
        "its JSON, as formatted by the server, is longer than the server's max_allowed_packet of "
        f"{server.largest_packet} bytes: increase it, or store large values elsewhere",
    )


# --- received messages -----------------------------------------------------------------------------
#
# Many inbox messages in one transaction: their rows in ``consumed_events``.

# The rows are in the order of the primary key, so that two transactions do not deadlock. A duplicate message is
# inserted once, by its first row.
CONSUME = for_flavours("""
INSERT INTO eventlog.consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
SELECT k.source, k.external_id, k.handler_name, k.event_id, k.payload_hash, k.consumed_date
FROM JSON_TABLE(%(rows)s, '$[*]' COLUMNS (
  source {text} PATH '$[0]', external_id {text} PATH '$[1]', handler_name {text} PATH '$[2]', event_id {id} PATH '$[3]',
  payload_hash {text} PATH '$[4]', consumed_date DATETIME(6) PATH '$[5]')) k
ON DUPLICATE KEY UPDATE source = eventlog.consumed_events.source
""")
CONSUME_ONE = """
INSERT INTO eventlog.consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
VALUES (%s, %s, %s, %s, %s, %s) ON DUPLICATE KEY UPDATE source = eventlog.consumed_events.source
"""
# The locking read sees the row of another transaction despite an older snapshot.
CONSUMED_ONE = """
SELECT source, external_id, handler_name, event_id, payload_hash, consumed_date FROM eventlog.consumed_events
WHERE source = %s AND external_id = %s AND handler_name = %s FOR UPDATE
"""
_CONSUMED = f"""
SELECT c.source, c.external_id, c.handler_name, c.event_id, c.payload_hash, c.consumed_date
FROM JSON_TABLE(%(rows)s, '$[*]' COLUMNS (
  source {{text}} PATH '$[0]', external_id {{text}} PATH '$[1]', handler_name {{text}} PATH '$[2]')) k
STRAIGHT_JOIN eventlog.consumed_events c FORCE INDEX (PRIMARY)
  ON c.source = k.source AND c.external_id = k.external_id AND c.handler_name = k.handler_name
{ALL_ROWS}
"""
# MySQL cannot lock the rows of a JSON_TABLE, and MariaDB cannot restrict the lock to a table.
CONSUMED = by_flavour(mysql=f"{_CONSUMED}FOR UPDATE OF c", mariadb=f"{_CONSUMED}FOR UPDATE")
FIND_CONSUMED = for_flavours(_CONSUMED)


def consumed_parameters(consumed: Iterable[ConsumeResult]) -> dict[str, str]:
    """Return the arguments of ``CONSUME``, ``CONSUMED`` and ``FIND_CONSUMED``."""
    return {
        "rows": as_json(
            (c.source, c.external_id, c.handler_name, str(c.event_id), c.payload_hash, as_timestamp(c.consumed_date))
            for c in consumed
        )
    }


def consumed_rows(found: Iterable[Sequence[Any]]) -> list[ConsumeResult]:
    return [
        ConsumeResult(source, external_id, name, UUID(event_id), payload_hash, consumed_date)
        for source, external_id, name, event_id, payload_hash, consumed_date in found
    ]
