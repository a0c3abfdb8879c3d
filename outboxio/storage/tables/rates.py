"""The table ``rates``: the next free start time of each handler with a cluster-wide rate."""

from __future__ import annotations

from outboxio.storage.statement import Port, Query, Statement

_INSERT = """
INSERT INTO eventlog.rates (namespace, handler_name, next_us)
"""
_UPSERT = f"""{_INSERT} VALUES (:namespace, :handler_name, :earliest + :span)
ON CONFLICT (namespace, handler_name) DO UPDATE SET next_us = greatest(rates.next_us, :earliest) + :span
"""
_OF_HANDLER = "FROM eventlog.rates WHERE namespace = :namespace AND handler_name = :handler_name"
# PostgreSQL infers the type of each parameter from its first occurrence. MySQL has no RETURNING: LAST_INSERT_ID(value)
# sets the value that the session returns next, and on a duplicate key the second of the two expressions is evaluated
# last.
RESERVE = Query(
    "",
    int,
    postgres=_UPSERT.replace(":earliest", "CAST(:earliest AS bigint)").replace(":span", "CAST(:span AS bigint)")
    + "RETURNING next_us",
    mysql=f"""{_INSERT} VALUES (:namespace, :handler_name, LAST_INSERT_ID(:earliest + :span))
ON DUPLICATE KEY UPDATE next_us = LAST_INSERT_ID(GREATEST(next_us, :earliest) + :span);
SELECT LAST_INSERT_ID()
""",
)
# SQLite uses separate connections for reads and writes.
RESERVE_ON_SQLITE = Statement(
    "", sqlite=_UPSERT.replace("greatest", "max").replace("rates.next_us", "eventlog_rates.next_us")
)
RESERVED_ON_SQLITE = Query("", int, sqlite=f"SELECT next_us {_OF_HANDLER}")


class Rates:
    """Reserves start times for handlers with a cluster-wide rate."""

    def __init__(self, port: Port, *, returns: bool = True) -> None:
        """``returns``: True if the statement that reserves can also return rows."""
        self._port = port
        self._returns = returns

    async def reserve(self, namespace: str, handler_name: str, *, earliest: int, span: int) -> int:
        """Reserve the next free time ``span`` of a handler, not before ``earliest``; return its start.

        All times are microseconds since 1970. Reserved spans never overlap.
        """
        values = {"namespace": namespace, "handler_name": handler_name, "earliest": earliest, "span": span}
        if self._returns:
            found = await self._port.fetch(RESERVE, **values)
        else:
            found = await self._port.change_and_fetch(RESERVE_ON_SQLITE, RESERVED_ON_SQLITE, **values)
        return found[-1] - span
