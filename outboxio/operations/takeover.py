"""Operations that wait for a process: requested in the background, or abandoned by a process that died.

The process that fans out checks for such operations every 10 s, by a query on an index of the running operations. A
bulk operation is resumed at its position. A bootstrap waits for the next call of ``outbox.bootstrap``, unless it should
be stopped. Any other operation may or may not have taken effect, and ends as FAILED.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

from msgspec.structs import replace

from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.model.redaction import Redact
from outboxio.operations.notifications import BulkRun
from outboxio.operations.recorder import AdminShard, log_end

CHECK_DELAY = 10.0  # seconds between two checks
SILENCE = timedelta(seconds=30)
"""A process that has not written for so long is considered dead. A chunk takes far less than a second."""

_MAX_STALE = 10  # operations that a check reads
_BETWEEN_REMOVALS = timedelta(hours=1)
_REMOVED_AT_ONCE = 1000

INTERRUPTED = (
    "the process that ran this operation died before it had finished; check the notifications before repeating the "
    "operation"
)


class Takeover:
    """Runs the operations that wait for a process."""

    def __init__(
        self,
        namespace: str,
        one: AdminShard,
        worker: str,
        *,
        fans_out: Callable[[], bool],
        keep: timedelta,
        redact: Redact,
    ) -> None:
        """``worker``: the name of this process in ``operations``. ``keep``: how long finished operations are kept."""
        self._namespace = namespace
        self._one = one
        self._operations = one.database.operations
        self._worker = worker
        self._fans_out = fans_out
        self._keep = keep
        self._redact = redact
        self._expected: list[UUID] = []
        self._run: BulkRun | None = None
        self._remove_at = one.clock()

    def expect(self, id: UUID) -> None:
        """Run an operation that was requested in this process, even if the process does not fan out."""
        self._expected.append(id)

    async def run_once(self) -> RoundResult:
        """Process a chunk of an operation, if one is waiting for this process."""
        if self._run is None:
            self._run = await self._next()
        run = self._run
        if run is None:
            return NOTHING
        try:
            await run.step()
        finally:
            if run.operation.has_ended or not run.is_ours:
                self._run = None
        return RoundResult(1, more=True)

    async def _next(self) -> BulkRun | None:
        """Become the worker of a waiting operation."""
        while self._expected:
            if (run := await self._take(self._expected.pop(0))) is not None:
                return run
        if not self._fans_out():
            return None
        for id in await self._operations.stale(self._namespace, self._one.clock() - SILENCE, _MAX_STALE):
            if (run := await self._take(id)) is not None:
                return run
        await self._remove_old()
        return None

    async def _take(self, id: UUID) -> BulkRun | None:
        now = self._one.clock()
        taken = await self._operations.take(self._namespace, id, self._worker, now - SILENCE, now)
        if taken is None:
            return None
        if is_bulk(taken.operation):
            return BulkRun(self._namespace, self._one, self._worker, taken, self._redact)
        # A bootstrap whose process is gone is taken only if a stop was requested.
        is_stopped = taken.operation.kind == "bootstrap"
        state, error = (OperationState.STOPPED, None) if is_stopped else (OperationState.FAILED, INTERRUPTED)
        interrupted = replace(taken.operation, state=state, error=error, updated_date=now, finished_date=now)
        if await self._operations.finish(self._namespace, interrupted, self._worker):
            log_end(interrupted)
        return None

    async def _remove_old(self) -> None:
        now = self._one.clock.settled()
        if now >= self._remove_at:
            removed = await self._operations.remove_old(self._namespace, now - self._keep, _REMOVED_AT_ONCE)
            if removed < _REMOVED_AT_ONCE:
                self._remove_at = now + _BETWEEN_REMOVALS


def is_bulk(operation: Operation) -> bool:
    """Return True for an operation that runs in chunks, so that any process can resume it."""
    return "search" in operation.request
