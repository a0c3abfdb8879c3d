"""The table ``jobs``.

While no job is due, a process reads one index per second for all jobs of a namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from outboxio.model.operating.operation import JobRow
from outboxio.storage.statement import Port, Query, Statement

if TYPE_CHECKING:
    from outboxio.storage.protocols import Session

# --- statements ------------------------------------------------------------------------------------

_COLUMNS = ", ".join("job_name" if name == "name" else name for name in JobRow.__struct_fields__)
_SELECT = f"SELECT {_COLUMNS} FROM eventlog.jobs WHERE namespace = :namespace"

ALL = Query(f"{_SELECT} ORDER BY job_name", JobRow)

# Errors may be long, so they are read only to be displayed.
WITHOUT_ERRORS = Query(f"{_SELECT.replace(' error,', ' NULL,')} ORDER BY job_name", JobRow)

# The rows for which the health rules may report a finding.
FAULTY = Query(
    f"{_SELECT} AND (due_date <= :now OR result <> 'SUCCEEDED' OR paused_date IS NOT NULL) ORDER BY job_name", JobRow
)

DUE = Query(f"{_SELECT} AND due_date <= :until ORDER BY due_date", JobRow)

# A row that another process has inserted in the meantime is kept.
INSERT = Statement("""
INSERT INTO eventlog.jobs (namespace, job_name, schedule, state, next_date, due_date, term, attempts, lease, lease_term,
  instance, succeeded, failed, missed)
SELECT :namespace, j.name, j.schedule, 'WAITING', j.next_date, j.due_date, 0, 0, '', 0, '', 0, 0, 0
FROM {rows :jobs j name text, schedule text, next_date timestamp, due_date timestamp} WHERE TRUE
ORDER BY j.name {keep jobs: namespace, job_name}
""")

_BY_NAME = "WHERE namespace = :namespace AND job_name = :name"
_OF_TERM = f"{_BY_NAME} AND term = :term"

RESCHEDULE = Statement(f"""
UPDATE eventlog.jobs SET schedule = :schedule, next_date = :next_date, due_date = :due_date
{_OF_TERM} AND state = 'WAITING'
""")

# The lease rejects a process whose lock was taken over. The term rejects a second claim of the same scheduled time.
CLAIM = Statement(f"""
UPDATE eventlog.jobs SET state = 'RUNNING', term = term + 1, moment_date = :moment_date, attempts = :attempts,
  next_date = :next_date, due_date = :due_date, lease = {{text :lease}}, lease_term = :lease_term,
  instance = :instance, started_date = :now, missed = missed + :missed, ordered_date = NULL
{_OF_TERM} AND state = :state AND (paused_date IS NULL OR ordered_date IS NOT NULL)
  AND EXISTS (SELECT 1 FROM eventlog.leases l WHERE l.name = {{text :lease}} AND l.term = :lease_term)
""")

SKIP_MISSED = Statement(f"""
UPDATE eventlog.jobs SET next_date = :next_date, due_date = :due_date, missed = missed + :missed
{_OF_TERM} AND state = 'WAITING'
""")

# A request to run the job that arrived during the run is due at once. A run that did not start does not count as an
# attempt.
END = Statement(f"""
UPDATE eventlog.jobs SET state = :state, due_date = COALESCE(ordered_date, :due_date), finished_date = :now,
  result = :result, error = :error, succeeded = succeeded + :succeeded, failed = failed + :failed,
  attempts = attempts - :given_back
{_OF_TERM} AND state = 'RUNNING'
""")

PAUSE = Statement(f"UPDATE eventlog.jobs SET paused_date = :now {_BY_NAME} AND paused_date IS NULL")
UNPAUSE = Statement(f"UPDATE eventlog.jobs SET paused_date = NULL {_BY_NAME} AND paused_date IS NOT NULL")

# The due date of a job that is running is kept, because it is the deadline of the run. END then makes the job due.
RUN_NOW = Statement(f"""
UPDATE eventlog.jobs SET ordered_date = :now, due_date = CASE WHEN state = 'RUNNING' THEN due_date ELSE :now END
{_BY_NAME}
""")

# The row of a running job is kept, unless the run has passed its deadline: then its process has died or the run hangs.
REMOVE = Statement(f"DELETE FROM eventlog.jobs {_BY_NAME} AND (state <> 'RUNNING' OR due_date <= :now)")

# --- the table -------------------------------------------------------------------------------------


class Jobs:
    """Reads and writes the jobs of a shard."""

    def __init__(self, admin: Port, own: Port) -> None:
        """``own``: the port of the scheduler, which never waits for statements of operators."""
        self._admin = admin
        self._own = own

    async def all(self, namespace: str, *, errors: bool = True) -> list[JobRow]:
        """Return all jobs, by name. ``errors=False`` leaves the errors out."""
        return await self._admin.fetch(ALL if errors else WITHOUT_ERRORS, namespace=namespace)

    async def faulty(self, namespace: str, now: datetime) -> list[JobRow]:
        """Return the jobs that are due, paused, or whose last run did not succeed, by name."""
        return await self._admin.fetch(FAULTY, namespace=namespace, now=now)

    async def due(self, namespace: str, until: datetime) -> list[JobRow]:
        """Return the jobs that are due at ``until``, earliest first."""
        return await self._own.fetch(DUE, namespace=namespace, until=until)

    async def insert(self, namespace: str, jobs: Sequence[JobRow]) -> None:
        """Insert the rows of new jobs. ``jobs`` must not be empty."""
        fields = ("name", "schedule", "next_date", "due_date")
        await self.write(INSERT, namespace=namespace, jobs=[{f: getattr(job, f) for f in fields} for job in jobs])

    async def write(self, statement: Statement, **values: Any) -> bool:
        """Run a statement of this module in autocommit mode; return True if a row has changed.

        UPDATE and COMMIT are one message to the server, so a process that freezes cannot keep a row locked.
        """
        return await self._own.execute(statement, **values) > 0

    async def write_in(self, session: Session, statement: Statement, **values: Any) -> bool:
        """Run a statement of this module in an open transaction; return True if a row has changed."""
        return await session.execute(*self._own.prepared(statement, values)) > 0
