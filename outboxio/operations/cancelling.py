"""Cancelling a run: the operation is recorded, and the process that has the run cancels it (decision 79)."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from uuid import UUID

from msgspec.structs import replace

from outboxio.errors import ConfigurationError
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.operations.arguments import id_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.recorder import AdminShard
from outboxio.support.aio import run_to_completion

PATIENCE = 3.0  # seconds for a process to report that it has the run; each process reads operations about once a second
PATIENCE_FOR_END = 7.0  # further seconds for a run to end: after 5 s at most it is stuck
LONGEST_PAUSE = 0.2  # seconds between two reads of the operation
_CLOCKS_DIFFER = timedelta(seconds=1)


class CancelOperations(AdminBase):
    """A part of ``Admin``: ``cancel``."""

    async def cancel(
        self, notification_id: UUID | str, *, actor: str | None = None, reason: str | None = None
    ) -> Operation:
        """Cancel the run of a notification that is in progress. Returns the recorded operation.

        The process that has the run cancels its task within about a second. The attempt counts as failed with
        :class:`CancelledByOperator`, which has the actor and the reason, and the retry policy decides what follows:
        ``skip`` the notification as well if it should not run again. An open transaction is rolled back. In a batch
        handler, all events of the call fail together. A hook is cancelled too, and runs again later.

        ``done=1`` (for a batch, the number of its events): the run was cancelled. ``refused=1``: it was not, and
        ``error`` says why:

        - No run was in progress: the notification had finished, is queued, or waits.
        - The handler is a plain function in a thread, which cannot be interrupted.

        If a handler ignores its cancellation, the attempt has failed, and ``error`` says that the run is stuck, as
        after a timeout. The call waits for the result, at most 10 s: later, the operation is still RUNNING.

        Raises :class:`ConfigurationError` for an unknown id.

        Example::

            operation = await outbox.admin.cancel(record.id, actor="ada", reason="it waits for a dead server")
            print(operation.done, operation.error)
            await outbox.admin.skip([record.id], reason="the order was cancelled")
        """
        id = id_argument(notification_id)
        requested = self._recorder.request("cancel", {"ids": [str(id)], "number": 1}, actor, reason)
        one, record = await self._found(id, requested.call)
        worker = f"{self._recorder.worker}:{requested.id.hex[-8:]}"
        operation = await self._recorder.begin(requested, one, worker)
        why = _why_idle(record, operation.created_date)
        try:
            if why is None:
                one.decisions_changed()
                if (ended := await self._result(one, operation.id, PATIENCE)) is not None:
                    return ended
                why = (
                    f"no process has reported a run of notification {id} within {PATIENCE:g} s: it is queued, or its "
                    "process does not respond. Skip it if it should not run"
                )
        except BaseException:
            await run_to_completion(self._recorder.end(one, replace(operation, state=OperationState.STOPPED), worker))
            raise
        refused = replace(operation, state=OperationState.DONE, matched=1, refused=1, error=why)
        await self._recorder.end(one, refused, worker)
        # No effect if a process has taken the operation in the meantime.
        return await self._result(one, operation.id, PATIENCE_FOR_END) or operation

    async def _found(self, id: UUID, call: str) -> tuple[AdminShard, NotificationRecord]:
        """Return the notification and its shard. Raises :class:`ConfigurationError` for an unknown id."""
        of_event: list[NotificationRecord] = []
        for one in self._shards.to_write(call, None):
            for record in await one.database.stored_notifications.select_by_id(self._namespace, [id]):
                if record.id == id:
                    return one, record
                of_event.append(record)
        if of_event:
            ids = ", ".join(f"{record.id} ({record.handler_name})" for record in of_event)
            raise ConfigurationError(f"{id} is an event; pass the id of one of its notifications: {ids}")
        raise ConfigurationError(f"there is no notification {id}; outboxio list shows the ids")

    async def _result(self, one: AdminShard, id: UUID, patience: float) -> Operation | None:
        """Return the operation once it has finished; ``None`` if it has not within ``patience`` seconds."""
        time = asyncio.get_running_loop().time
        deadline, pause = time() + patience, 0.02
        while True:
            found = await one.database.operations.get(self._namespace, id)
            if found is not None and found.has_ended:
                return found
            if time() >= deadline:
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _why_idle(record: NotificationRecord, now: datetime) -> str | None:
    """Return why no run of a notification can be in progress; ``None`` if one may be.

    A run may be in progress after the notification was skipped, or has expired.
    """
    subject = f"notification {record.id} of {record.handler_name!r}"
    if record.state in (State.SUCCEEDED, State.DEAD):
        return f"{subject} has finished: it is {record.state}"
    if record.state is State.BLOCKED:
        return f"{subject} waits behind an earlier notification of its key. Skip it if it should not run"
    if record.state in (State.PENDING, State.FAILED, State.DYING) and record.next_retry_at > now + _CLOCKS_DIFFER:
        return f"{subject} is not due before {record.next_retry_at:%Y-%m-%d %H:%M:%S} UTC. Skip it if it should not run"
    return None
