"""The ``jobs`` table, on every dialect: statements with ``?``, sent through sessions.

All jobs of a namespace cost an idle process one read of an index per second. So the statements need no speed of a
dialect, and a dialect differs only in its placeholders, in the name of the table, and in the insertion of a known row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import chain, count
from typing import Any

import msgspec

from outboxio.model.operating.job import JobRow
from outboxio.storage.protocols import Database, Session

_COLUMNS = ", ".join("job_name" if name == "name" else name for name in JobRow.__struct_fields__)

ALL = f"SELECT {_COLUMNS} FROM eventlog.jobs WHERE namespace = ? ORDER BY job_name"

# An error may be long, and is read where a person reads the error.
WITHOUT_ERRORS = ALL.replace(" error,", " NULL,")

# The rows in which the rules of the verdict may find a fault.
FAULTY = f"""
SELECT {_COLUMNS} FROM eventlog.jobs
WHERE namespace = ? AND (due_date <= ? OR result <> 'SUCCEEDED' OR paused_date IS NOT NULL) ORDER BY job_name
"""

DUE = f"SELECT {_COLUMNS} FROM eventlog.jobs WHERE namespace = ? AND due_date <= ? ORDER BY due_date"

# The row of a job that a different process has inserted meanwhile stays.
INSERT = """
INSERT INTO eventlog.jobs (namespace, job_name, schedule, state, next_date, due_date, term, attempts, lease, lease_term,
  instance, succeeded, failed, missed)
VALUES
"""
_NEW_ROW = "(?, ?, ?, 'WAITING', ?, ?, 0, 0, '', 0, '', 0, 0, 0)"
_NEW_ROWS = 100  # rows in a statement
_KEEPS = {
    "mysql": "ON DUPLICATE KEY UPDATE job_name = job_name",
    "mariadb": "ON DUPLICATE KEY UPDATE job_name = job_name",
}

RESCHEDULE = """
UPDATE eventlog.jobs SET schedule = ?, next_date = ?, due_date = ?
WHERE namespace = ? AND job_name = ? AND term = ? AND state = 'WAITING'
"""

# The lease refuses a process whose lock was taken over. The term refuses a second claim of the same moment.
CLAIM = """
UPDATE eventlog.jobs SET state = 'RUNNING', term = term + 1, moment_date = ?, attempts = ?, next_date = ?, due_date = ?,
  lease = ?, lease_term = ?, instance = ?, started_date = ?, missed = missed + ?, ordered_date = NULL
WHERE namespace = ? AND job_name = ? AND term = ? AND state = ?
  AND (paused_date IS NULL OR ordered_date IS NOT NULL)
  AND EXISTS (SELECT 1 FROM eventlog.leases WHERE name = ? AND term = ?)
"""

PASS_OVER = """
UPDATE eventlog.jobs SET next_date = ?, due_date = ?, missed = missed + ?
WHERE namespace = ? AND job_name = ? AND term = ? AND state = 'WAITING'
"""

# An order to run the job that came during the run is due at once. A run that did not start gives its attempt back.
END = """
UPDATE eventlog.jobs SET state = ?, due_date = COALESCE(ordered_date, ?), finished_date = ?, result = ?, error = ?,
  succeeded = succeeded + ?, failed = failed + ?, attempts = attempts - ?
WHERE namespace = ? AND job_name = ? AND term = ? AND state = 'RUNNING'
"""

PAUSE = "UPDATE eventlog.jobs SET paused_date = ? WHERE namespace = ? AND job_name = ? AND paused_date IS NULL"
UNPAUSE = "UPDATE eventlog.jobs SET paused_date = NULL WHERE namespace = ? AND job_name = ? AND paused_date IS NOT NULL"

# The due date of a run under way stays: the date says when the run must have ended. END then makes the order due.
ORDER = """
UPDATE eventlog.jobs SET ordered_date = ?, due_date = CASE WHEN state = 'RUNNING' THEN due_date ELSE ? END
WHERE namespace = ? AND job_name = ?
"""

# A run that goes on keeps the row. A run that must have ended long ago has no process, or does not end.
REMOVE = "DELETE FROM eventlog.jobs WHERE namespace = ? AND job_name = ? AND (state <> 'RUNNING' OR due_date <= ?)"


class JobTable:
    """Reads and writes the rows of a namespace."""

    def __init__(self, namespace: str, database: Database) -> None:
        self._namespace = namespace
        self._database = database
        self._dialect = database.dialect

    async def all(self, *, errors: bool = True) -> list[JobRow]:
        """All jobs, by name. ``errors=False`` leaves the errors out."""
        return await self._read(ALL if errors else WITHOUT_ERRORS, self._namespace)

    async def faulty(self, now: datetime) -> list[JobRow]:
        """The jobs that are due, whose last run did not succeed, or that are paused, by name."""
        return await self._read(FAULTY, self._namespace, now)

    async def due(self, until: datetime) -> list[JobRow]:
        """The jobs that are due at ``until``, the first first."""
        return await self._read(DUE, self._namespace, until)

    async def insert(self, jobs: Sequence[JobRow]) -> None:
        """Insert the rows of new jobs."""
        keeps = _KEEPS.get(self._dialect, "ON CONFLICT DO NOTHING")
        for begin in range(0, len(jobs), _NEW_ROWS):
            some = jobs[begin : begin + _NEW_ROWS]
            values = [(self._namespace, job.name, job.schedule, job.next_date, job.due_date) for job in some]
            await self.write(f"{INSERT}{', '.join([_NEW_ROW] * len(some))} {keeps}", *chain.from_iterable(values))

    async def write(self, statement: str, *args: Any) -> bool:
        """Run a statement of this module, which is a transaction by itself; True if a row has changed."""
        return await self._database.write_alone(self._sql(statement), args) > 0

    async def write_in(self, session: Session, statement: str, *args: Any) -> bool:
        """Run a statement of this module in an open transaction; True if a row has changed."""
        return await session.execute(self._sql(statement), args) > 0

    async def _read(self, statement: str, *args: Any) -> list[JobRow]:
        async with self._database.reading() as session:
            await session.begin_reading()
            rows = await session.fetch(self._sql(statement), args)
            await session.rollback()
        names = JobRow.__struct_fields__
        return [msgspec.convert({n: row[i] for i, n in enumerate(names)}, JobRow, strict=False) for row in rows]

    def _sql(self, statement: str) -> str:
        if self._dialect == "sqlite":
            return statement.replace("eventlog.", "eventlog_")
        if self._dialect in ("mysql", "mariadb"):
            return statement.replace("?", "%s")
        numbers = count(1)
        return re.sub(r"\?", lambda _: f"${next(numbers)}", statement)
