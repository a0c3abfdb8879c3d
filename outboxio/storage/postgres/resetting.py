"""Connections of outboxio's own pool, which reset the server session at the end of each transaction."""

from __future__ import annotations

from typing import Any

from outboxio.errors import TransactionEnded
from outboxio.storage.postgres.errors import named
from outboxio.storage.postgres.server_info import user_of
from outboxio.storage.postgres.session import ending_in

_Connection: Any = object  # of asyncpg, or of psycopg with the same methods

# RESET ALL keeps the role and temporary tables: the next action would run as a different user, or read the temporary
# table of an earlier action. RESET SESSION AUTHORIZATION comes first, because it also resets a role that the connection
# was opened with.
RESET_IDENTITY = "RESET SESSION AUTHORIZATION;\nRESET ROLE;\n"
DISCARD_TABLES = "\nDISCARD TEMP;"

# Most actions change neither. So each connection has a prepared statement that releases the advisory locks, and returns
# a row if there is a role or a temporary table; only then do the statements above follow. It is prepared, because
# planning it would take longer than all other statements of a reset.
RELEASE = "outboxio_release"
PREPARE_RELEASE = f"""
PREPARE {RELEASE} AS SELECT 1 WHERE pg_catalog.pg_advisory_unlock_all() IS NULL
  OR pg_catalog.current_setting('role') OPERATOR(pg_catalog.<>) 'none'
  OR pg_catalog.pg_my_temp_schema() OPERATOR(pg_catalog.<>) '0'
"""
QUICK_RESET = f"CLOSE ALL;\nUNLISTEN *;\nRESET ALL;\nEXECUTE {RELEASE}"
NO_ROW = "SELECT 0"


class ResettingConnection(_Connection):  # type: ignore[misc]  # the methods of both drivers
    """A connection of outboxio's own pool. The statements that reset the session are sent together with COMMIT."""

    _execute_with_arguments: Any
    """The driver's own method."""
    is_reset: bool
    """True if the session is in the state of a new connection."""
    refusals: int
    """The shard's rejections of prepared statements that this connection has handled; see :class:`Plans`."""
    _quick: bool | None
    """True if QUICK_RESET is prepared; False if it cannot be used; ``None`` before the first reset."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        parent.__init__(*args, **kwargs)
        self._is_ending = self._has_listeners = False
        self._user = user_of(self)
        self._quick = None if self._user is not None else False
        self.is_reset = True
        self.refusals = 0

    def end_with_reset(self) -> None:
        """Send the reset with the next statement, which ends the transaction."""
        self._is_ending = True

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        if args:
            return self._execute_with_arguments(query, *args, timeout=timeout)
        parent: Any = super()
        if self._is_ending:
            return self._end(query, timeout)
        if ";" in query[:-1]:
            self._reject_transaction_end(query)
        return parent.execute(query, timeout=timeout)

    async def _end(self, query: str, timeout: float | None) -> None:
        parent: Any = super()
        self._is_ending = False
        quick = self._quick
        reset = QUICK_RESET if quick else self.get_reset_query()
        if quick is None:
            reset += PREPARE_RELEASE
        try:
            status: str = await parent.execute(f"{query}\n{reset}", timeout=timeout)
        except named("InvalidSQLStatementName", "InvalidSqlStatementName", "DuplicatePreparedStatement") as error:
            if RELEASE not in str(error):
                raise
            status = ""  # the transaction has ended, but your application or a proxy has dropped or replaced RELEASE
        is_clean = status == NO_ROW and user_of(self) == self._user if quick else bool(status)
        self._quick = quick is not False and is_clean
        self.is_reset = is_clean and not self._has_listeners

    def _reject_transaction_end(self, query: str) -> None:
        """Reject statements that end the transaction: the driver would not notice a new transaction."""
        if self.is_in_transaction() and (ending := ending_in(query, self)) is not None:
            raise TransactionEnded("an action", ending)

    def get_reset_query(self) -> str:
        parent: Any = super()
        return RESET_IDENTITY + str(parent.get_reset_query()) + DISCARD_TABLES

    async def reset(self, *, timeout: float | None = None) -> None:
        parent: Any = super()
        await parent.reset(timeout=timeout)
        self._is_ending = self._has_listeners = False
        self.is_reset = True

    async def add_listener(self, channel: str, callback: Any) -> None:
        self._has_listeners = True
        parent: Any = super()
        await parent.add_listener(channel, callback)
