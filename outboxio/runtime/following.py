"""Each process reads the decisions of operators about once a second, and applies them.

A single statement reads the pauses and the partition counts. While notifications are in flight, it also reads whether
an operator has cancelled a run (decision 79), so cancellation costs no additional statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from msgspec.structs import replace

from outboxio.errors import CancelledByOperator
from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.operations.recorder import log_end
from outboxio.runs.run import Run
from outboxio.runtime.auto_partitions import AutoPartitions
from outboxio.runtime.lock_plan import Declarations
from outboxio.support.codec import is_list

if TYPE_CHECKING:
    from outboxio.runtime.shard_run import ShardRun

WITHIN = 0.9  # seconds between two reads in a process with runs, if the process gets no wake-ups
_SOON = 0.1  # seconds until a cancelled run is checked again
_VALID = timedelta(seconds=10)
"""A cancel operation is ignored when it is older, because a new run may be in progress by then."""
_ANY_TIME = datetime(9999, 1, 1)


class Following:
    """Announces the handlers of a process, and applies what operators have decided."""

    def __init__(self, run: ShardRun, *, handling: bool) -> None:
        """``handling``: False if this process runs no handlers."""
        shard = run.shard
        environment, database = shard.environment, shard.database
        self._run = run
        self._handling = handling
        self._database = database
        self._namespace, self._handlers = environment.namespace, environment.handlers
        self._is_woken = environment.settings.notify and database.wakes_across_processes
        self._declarations = Declarations(self._namespace, database.partitions, self._handlers, shard.clock)
        self._auto = AutoPartitions(run.setup, run.dispatcher, shard.decisions_changed)
        self._cancelling = Cancelling(run)
        self._dispatcher, self._rows = run.dispatcher, run.dispatcher.rows

    async def run_once(self) -> RoundResult:
        """Announce the handlers, read the decisions, and apply them."""
        run, dispatcher = self._run, self._dispatcher
        await run.announcer.announce_if_due()
        if not self._handling:
            return NOTHING
        dispatcher.apply_start_dates(run.announcer.start_dates)
        await self._declarations.make()
        has_rows = bool(self._rows)
        control = await self._database.subscriptions.control_state(self._namespace, cancels=has_rows)
        dispatcher.apply_pauses(control.pauses)
        counts = {count.handler_name: count for count in control.partitions}
        dispatcher.apply_partition_counts(counts)
        run.housekeeping.apply_partition_counts(control.partitions)
        run.membership.apply(self._handlers.names_to_run, counts)
        dispatcher.transfers.offer()
        await self._auto.look(counts)
        if not (has_rows or self._cancelling.cancelled):
            return NOTHING
        if (control.has_cancels or self._cancelling.cancelled) and await self._cancelling.look():
            return RoundResult(0, again_in=_SOON)
        return NOTHING if self._is_woken else RoundResult(0, again_in=WITHIN)


class Cancelling:
    """Cancels runs of this process for operators, and records the results."""

    def __init__(self, run: ShardRun) -> None:
        shard = run.shard
        self._namespace = shard.environment.namespace
        self._worker = shard.environment.owner
        self._operations = shard.database.operations
        self._clock = shard.clock
        self._dispatcher = run.dispatcher
        self.cancelled: dict[UUID, tuple[Operation, Run, Sequence[Run]]] = {}
        """By operation: the cancelled run and its rows, until the result is recorded."""

    async def look(self) -> bool:
        """Cancel runs as requested by operators. Return True if this should be called again soon."""
        is_postponed = False
        for operation in await self._operations.running(self._namespace, "cancel", self._clock() - _VALID):
            if operation.id not in self.cancelled:
                is_postponed |= await self._begin(operation)
        for operation, run, rows in list(self.cancelled.values()):
            if any(self._dispatcher.rows.get(row.notification.id) is row for row in rows):
                continue  # the run is active, or its outcome is not written yet
            self.cancelled.pop(operation.id, None)  # so that an error below is not repeated in each round
            if await self._take(operation):
                await self._finish(operation, run, rows)
        return is_postponed or bool(self.cancelled)

    async def _begin(self, operation: Operation) -> bool:
        """Cancel the run of an operation, if it is in this process. True if it cannot be cancelled right now."""
        found = self._dispatcher.cancel(_id_in(operation), CancelledByOperator(operation.actor, operation.reason))
        if isinstance(found, Run):
            if found.cancelled_by is None:
                return True
            self.cancelled[operation.id] = operation, found, found.called
            if not await self._take(operation):
                self.cancelled.pop(operation.id, None)
        elif found is not None and await self._take(operation):
            await self._record(operation, refused=1, error=found)
        return False

    async def _take(self, operation: Operation) -> bool:
        """Become the process that records the result; False if the operation has finished."""
        taken = await self._operations.take(self._namespace, operation.id, self._worker, _ANY_TIME, self._clock())
        return taken is not None

    async def _finish(self, operation: Operation, run: Run, rows: Sequence[Run]) -> None:
        name, number = run.queue.handler.name, len(rows)
        if run.abandoned:
            error = (
                f"handler {name!r} ignores its cancellation: the attempt has failed, and the run is stuck in process "
                f"{self._worker}"
            )
            await self._record(operation, done=number, error=error)
        elif rows[0].is_settled:
            await self._record(operation, refused=number, error=f"the run of {name!r} has committed its transaction")
        elif run.interrupted:
            error = f"the shutdown of process {self._worker} has interrupted the run of {name!r}, which starts again"
            await self._record(operation, refused=number, error=error)
        else:
            await self._record(operation, done=number)

    async def _record(self, operation: Operation, *, done: int = 0, refused: int = 0, error: str | None = None) -> None:
        now = self._clock()
        ended = replace(
            operation, state=OperationState.DONE, matched=done + refused, done=done, refused=refused, error=error,
            updated_date=now, finished_date=now,
        )  # fmt: skip
        if await self._operations.finish(self._namespace, ended, self._worker):
            log_end(ended)


def _id_in(operation: Operation) -> UUID:
    ids = operation.request["ids"]
    assert is_list(ids)
    return UUID(str(ids[0]))
