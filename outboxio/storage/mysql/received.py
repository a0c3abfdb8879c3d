"""Many inbox messages in a transaction: their rows of ``consumed_events``. ``insertion.py`` writes their events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from outboxio.storage.mysql.connection import ALL_ROWS, fetch, run
from outboxio.storage.mysql.flavour import Server, by_flavour, for_flavours
from outboxio.storage.mysql.values import as_json, as_moment
from outboxio.storage.protocols import ConsumeResult

# The rows come in the order of the primary key, so that two transactions do not deadlock. A message that comes twice is
# inserted once, by its first row.
CONSUME_ALL = for_flavours("""
INSERT INTO eventlog.consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
SELECT k.source, k.external_id, k.handler_name, k.event_id, k.payload_hash, k.consumed_date
FROM JSON_TABLE(%(rows)s, '$[*]' COLUMNS (
  source {text} PATH '$[0]', external_id {text} PATH '$[1]', handler_name {text} PATH '$[2]', event_id {id} PATH '$[3]',
  payload_hash {text} PATH '$[4]', consumed_date DATETIME(6) PATH '$[5]')) k
ON DUPLICATE KEY UPDATE source = eventlog.consumed_events.source
""")
_CONSUMED_ALL = f"""
SELECT c.source, c.external_id, c.handler_name, c.event_id, c.payload_hash, c.consumed_date
FROM JSON_TABLE(%(rows)s, '$[*]' COLUMNS (
  source {{text}} PATH '$[0]', external_id {{text}} PATH '$[1]', handler_name {{text}} PATH '$[2]')) k
STRAIGHT_JOIN eventlog.consumed_events c FORCE INDEX (PRIMARY)
  ON c.source = k.source AND c.external_id = k.external_id AND c.handler_name = k.handler_name
{ALL_ROWS}
"""
# MySQL cannot lock the rows of a JSON_TABLE, and MariaDB cannot say which tables are to be locked.
CONSUMED_ALL = by_flavour(mysql=f"{_CONSUMED_ALL}FOR UPDATE OF c", mariadb=f"{_CONSUMED_ALL}FOR UPDATE")


async def consume_all(connection: Any, server: Server, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
    """Write the rows that are missing; all rows afterwards."""
    rows = as_json(
        (c.source, c.external_id, c.handler_name, str(c.event_id), c.payload_hash, as_moment(c.consumed_date))
        for c in consumed
    )
    await run(connection, server.spell(CONSUME_ALL), {"rows": rows})
    found = await fetch(connection, server.spell(CONSUMED_ALL), {"rows": rows})
    return [
        ConsumeResult(source, external_id, name, UUID(event_id), payload_hash, moment)
        for source, external_id, name, event_id, payload_hash, moment in found
    ]
