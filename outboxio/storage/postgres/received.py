"""Many inbox messages in a transaction: their rows of ``consumed_events``, and their events."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from outboxio.model.event import ReceivedEvent
from outboxio.storage.postgres.columns import JSON, OF_ACTION, OF_EVENT
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols import ConsumeResult

# The statements run on the application's connections, with the application's search_path; see session.py.

_CONSUMED = ", ".join(ConsumeResult.__struct_fields__)

# The rows come in the order of the primary key, so that two transactions do not deadlock. A message that comes twice is
# inserted once, by its first row.
CONSUME_ALL = f"""
INSERT INTO eventlog.consumed_events ({_CONSUMED})
SELECT c.source, c.external_id, c.handler_name, c.event_id, c.payload_hash, c.consumed_date FROM ROWS FROM (
  pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]),
  pg_catalog.unnest($3::pg_catalog.text[]), pg_catalog.unnest($4::pg_catalog.text[]::pg_catalog.uuid[]),
  pg_catalog.unnest($5::pg_catalog.text[]), pg_catalog.unnest($6::pg_catalog.text[]::timestamp[])
) AS c(source, external_id, handler_name, event_id, payload_hash, consumed_date)
ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
CONSUMED_ALL = """
SELECT c.source, c.external_id, c.handler_name, c.event_id, c.payload_hash, c.consumed_date FROM ROWS FROM (
  pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]),
  pg_catalog.unnest($3::pg_catalog.text[])
) AS k(source, external_id, handler_name)
JOIN eventlog.consumed_events c ON c.source OPERATOR(pg_catalog.=) k.source
  AND c.external_id OPERATOR(pg_catalog.=) k.external_id AND c.handler_name OPERATOR(pg_catalog.=) k.handler_name
"""

_of_event, _of_action = attrgetter(*(column for column in OF_EVENT if column != "headers")), attrgetter(*OF_ACTION)
assert list(OF_EVENT)[-1] == "headers"

# Each message is an action of its own, so the columns of the action are arrays as well.
_CASTS = {
    **OF_EVENT,
    **dict.fromkeys(OF_ACTION, ""),
    **dict.fromkeys(("action_id", "causation_id"), "::pg_catalog.uuid[]"),
    **dict.fromkeys(("started_date", "completion_date"), "::timestamp[]"),
    "hops": "::int[]",
}
_VALUES = {
    **{c: f"e.{c}::pg_catalog.jsonb" if c in JSON else f"e.{c}" for c in _CASTS},
    "event_date": "e.completion_date",
    "delivered": "FALSE",
}
_ARRAYS = ", ".join(
    f"pg_catalog.unnest(${number}::pg_catalog.text[]{cast})" for number, cast in enumerate(_CASTS.values(), 1)
)
INSERT_RECEIVED = f"""
INSERT INTO eventlog.events ({", ".join(_VALUES)})
SELECT {", ".join(_VALUES.values())}
FROM ROWS FROM ({_ARRAYS}) AS e({", ".join(_CASTS)})
"""


async def consume_all(connection: Any, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
    """Write the rows that are missing; all rows afterwards."""
    columns = [as_texts(column) for column in zip(*map(_values, consumed), strict=True)]
    await connection.execute(CONSUME_ALL, *columns)
    return [ConsumeResult(*row) for row in await connection.fetch(CONSUMED_ALL, *columns[:3])]


async def insert_received(connection: Any, received: Sequence[ReceivedEvent]) -> None:
    """Write events, each of an action of its own, in a single statement."""
    rows = [[*_of_event(event), action.headers_of(event), *_of_action(action)] for action, event in received]
    await connection.execute(INSERT_RECEIVED, *(as_texts(column) for column in zip(*rows, strict=True)))


def _values(row: ConsumeResult) -> tuple[Any, ...]:
    return row.source, row.external_id, row.handler_name, row.event_id, row.payload_hash, row.consumed_date
