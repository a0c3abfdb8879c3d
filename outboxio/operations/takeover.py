"""Operations that wait for a process: ordered in the background, or left behind by a process that died.

The process that fans out looks for such operations every 10 s, by a query of an index that has the operations under
way. A bulk order goes on where the order was left. A bootstrap is left to the next call of ``outbox.bootstrap``, unless
it is to be stopped. Any other order may have been carried out or not, and ends FAILED.
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

LOOK_DELAY = 10.0  # seconds between two looks
SILENCE = timedelta(seconds=30)
"""A process that has not written for so long counts as dead. A piece takes far less than a second."""

_MOST = 10  # operations that a look reads
_BETWEEN_REMOVALS = timedelta(hours=1)
_REMOVED_AT_ONCE = 1000

INTERRUPTED = (
    "the process that carried the order out has ended before the order did; look at the notifications before you "
    "repeat the order"
)


class Takeover:
    """Carries out the operations that wait for a process."""

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
        """``worker``: the name of this process in ``operations``. ``keep``: ended operations are kept for so long."""
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
        """Carry out an operation that this process has ordered in the background, also if this process fans out not."""
        self._expected.append(id)

    async def run_once(self) -> RoundResult:
        """Do a piece of an operation, if any operation waits for this process."""
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
        """Become the worker of an operation that waits."""
        while self._expected:
            if (run := await self._take(self._expected.pop(0))) is not None:
                return run
        if not self._fans_out():
            return None
        for id in await self._operations.stale(self._namespace, self._one.clock() - SILENCE, _MOST):
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
        # A bootstrap whose process is gone is taken only after an order to stop it.
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
    """True for an order that pieces carry out, so that any process can go on."""
    return "search" in operation.request
