"""The statements that settle notifications: equal outcomes (a bucket) are a single UPDATE."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from outboxio.model.outcome import Bucket
from outboxio.storage.mysql.columns import BY_ID
from outboxio.storage.mysql.connection import Arguments, id_list
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.values import as_json, as_moment

# The fence (decision 3). The statement that writes the outcomes locks the lease rows shared. A successor that raises a
# term waits for this lock; after the successor has raised the term, the statement finds no lease. A plain join would
# write after the commit of the new term. EXISTS would become a join that scans the leases, and waits for the leases of
# foreign handlers. LIMIT makes the server look the leases up once, and not once for each row.
_HELD = """
SELECT held.handler_name, held.partition_number FROM (
  SELECT mine.handler_name, mine.partition_number FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (
    name {text} PATH '$[0]', handler_name {text} PATH '$[1]', partition_number SMALLINT PATH '$[2]',
    term BIGINT PATH '$[3]')) mine
  WHERE (SELECT 1 FROM eventlog.leases l WHERE l.name = mine.name AND l.term = mine.term LIMIT 1
    LOCK IN SHARE MODE) = 1
  LIMIT 18446744073709551615) held
"""
_UNSETTLED = "n.state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED')"

SETTLE = for_flavours(f"""
UPDATE {BY_ID} SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND {_UNSETTLED} AND (n.handler_name, n.partition_number) IN ({_HELD})
""")

# The same, with a next_retry_at and an error for each row:
# * MySQL looks the details of a row up, by an index made for the purpose. A join is refused by MySQL unless a
#   database is selected.
# * MariaDB joins the details. A lookup would read all details for each row.
# If an operator has replaced the list of errors by a different JSON value, a new list replaces that value, so that the
# error is kept.
_DETAILS = """JSON_TABLE(%(details)s, '$[*]' COLUMNS (
  id {id} PATH '$[0]', next_retry_at DATETIME(6) PATH '$[1]', error {document} PATH '$[2]'))"""
_LATEST = """CASE WHEN CAST(JSON_TYPE(n.errors) AS CHAR) {collate} <> 'ARRAY' THEN JSON_ARRAY()
  WHEN JSON_LENGTH(n.errors) >= 10 THEN JSON_REMOVE(n.errors, '$[0]') ELSE n.errors END"""
_LOOKED_UP = f"(SELECT o.{{column}} FROM (SELECT d.* FROM {_DETAILS} d LIMIT 18446744073709551615) o WHERE o.id = n.id)"
SETTLE_WITH_DETAILS: Statement = {
    "mysql": for_flavours(f"""
UPDATE {BY_ID} SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s,
  n.next_retry_at = COALESCE({_LOOKED_UP.replace("{column}", "next_retry_at")}, n.next_retry_at),
  n.errors = JSON_MERGE_PRESERVE({_LATEST}, {_LOOKED_UP.replace("{column}", "error")})
WHERE n.id IN ({{ids}}) AND {_UNSETTLED} AND (n.handler_name, n.partition_number) IN ({_HELD})
""")["mysql"],
    "mariadb": for_flavours(f"""
UPDATE {_DETAILS} o STRAIGHT_JOIN {BY_ID} ON n.id = {{id_of o.id}}
SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s,
  n.next_retry_at = COALESCE(o.next_retry_at, n.next_retry_at), n.errors = JSON_MERGE_PRESERVE({_LATEST}, o.error)
WHERE {_UNSETTLED} AND (n.handler_name, n.partition_number) IN ({_HELD})
""")["mariadb"],
}


def settlement(bucket: Bucket, now: datetime, server: Server) -> tuple[str, Arguments]:
    """The statement that settles a bucket, with the arguments."""
    args: dict[str, Any] = {
        "state": bucket.state.value,
        "attempts": bucket.attempts,
        "now": now,
        "leases": as_json((lease.name, lease.handler_name, lease.partition, lease.term) for lease in bucket.leases),
    }
    statement = SETTLE
    if bucket.has_details:
        statement = SETTLE_WITH_DETAILS
        args["details"] = as_json(
            (
                outcome.notification_id,
                None if outcome.next_retry_at is None else as_moment(outcome.next_retry_at),
                outcome.error,
            )
            for outcome in bucket.by_id
        )
    return server.spell(statement).replace("{ids}", id_list(bucket.ids)), args
