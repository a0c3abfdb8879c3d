"""The operations ``retry``, ``skip`` and ``stop``. Everything that matches a filter changes in chunks (decision 44).

Each chunk is a transaction that changes up to 1,000 notifications and writes the position into ``operations``. A
process that resumes the operation after a crash starts right after the last chunk, and no notification changes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.actions.executor import refuse_claimed, refuse_in_claiming_transaction
from outboxio.model.notification import State
from outboxio.model.operating.groups import Filter, Search
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.model.redaction import Redact
from outboxio.operations.arguments import id_argument, ids_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import TO_RETRY, TO_SKIP, as_request, filter_argument, frozen, search_of
from outboxio.operations.recorder import (
    AdminShard,
    ChangeCounts,
    OperationRequest,
    added_up,
    after_error,
    log_end,
    naming_rights,
)
from outboxio.storage.protocols import BulkOperation, Database, Taken
from outboxio.storage.tables.operations import NOBODY
from outboxio.support.aio import run_to_completion
from outboxio.support.duration import pause_after
from outboxio.support.log import log_of

CHUNK = 1000  # notifications


class BulkRun:
    """A bulk operation on a shard, carried out by this process.

    Example::

        while run.is_ours and not run.operation.has_ended:
            await run.step()
    """

    def __init__(self, namespace: str, one: AdminShard, worker: str, taken: Taken, redact: Redact) -> None:
        """``worker``: the name under which this process has written or taken the operation."""
        self.operation = taken.operation
        """The operation, with the counts so far."""
        self.is_ours = True
        """False if another process has taken over the operation, because this process was unresponsive for too long."""
        self._namespace = namespace
        self._one = one
        self._worker = worker
        self._reached = taken.reached
        self._redact = redact
        search = msgspec.convert(self.operation.request["search"], Search)
        kind: Literal["retry", "skip"] = "retry" if self.operation.kind == "retry" else "skip"
        self._bulk = BulkOperation(kind, self.operation.id, worker, search)

    @property
    def database(self) -> Database:
        return self._one.database

    async def step(self) -> None:
        """Process a chunk, and end the operation after the last chunk.

        A transient error leaves the operation RUNNING: call the method again, or leave the rest to another process.
        Any other error ends the operation as FAILED.
        """
        try:
            async with naming_rights(self.database, self.operation.kind):
                await self._step()
        except Exception as error:
            database = self.database
            if not (database.is_transient(error) or database.is_unreachable(error)):
                await self._end(after_error(self.operation, error, self._redact))
            raise

    async def stop(self) -> None:
        """End the operation as STOPPED, unless it has ended or belongs to another process."""
        if self.is_ours and not self.operation.has_ended:
            await self._end(replace(self.operation, state=OperationState.STOPPED))

    async def look(self) -> None:
        """Read the operation that another process carries out."""
        self.operation = await self.database.operations.get(self._namespace, self.operation.id) or self.operation

    async def _step(self) -> None:
        now = self._one.clock()
        chunk = await self.database.search.change_chunk(self._namespace, self._bulk, self._reached, CHUNK, now)
        if not chunk.is_ours:
            await self._lose()
            return
        so_far = self.operation
        self.operation = replace(
            so_far, matched=so_far.matched + chunk.matched, done=so_far.done + chunk.done,
            refused=so_far.refused + chunk.refused, updated_date=now,
        )  # fmt: skip
        self._reached = chunk.next
        if chunk.done:
            self._one.wake()
        if chunk.next is None:
            await self._end(replace(self.operation, state=OperationState.DONE))

    async def _lose(self) -> None:
        """Handle an operation that was stopped or taken over by another process."""
        if await self.database.operations.stop_requested(self._namespace, self.operation.id):
            await self.stop()
        else:
            self.is_ours = False
            await self.look()

    async def _end(self, operation: Operation) -> None:
        now = self._one.clock()
        ended = replace(operation, updated_date=now, finished_date=now)
        if await self.database.operations.finish(self._namespace, ended, self._worker):
            self.operation = ended
            log_end(ended)
        else:
            self.is_ours = False
            await self.look()


# --- the operations -------------------------------------------------------------------------------


logger = log_of(__name__)

Progress = Callable[[Operation], object]
"""Called with a bulk operation after each chunk."""

COUNTED_IN_DRY_RUN = 100_000
_FOLLOW_DELAY = 0.5  # seconds between two reads of an operation that another process carries out
_MAX_TRIES = 10  # of a chunk that fails with a transient error
_RECORDED_IDS = 100  # ids in the record of an operation; of further ids only the count is recorded

#: The states that an operation cannot change.
_REFUSED: dict[str, Collection[State]] = {"retry": (), "skip": (State.SUCCEEDED, State.SKIPPED)}

Kind = Literal["retry", "skip"]


class _Call(Struct, frozen=True):
    """A call of ``retry`` or ``skip``."""

    kind: Kind
    states: tuple[State, ...]
    """The states used if the filter has none."""
    dry_run: bool
    background: bool
    progress: Progress | None
    shard: str | None


class NotificationOperations(AdminBase):
    """A part of ``Admin``: ``retry`` and ``skip``. Each call writes a row of ``operations``."""

    async def retry(
        self,
        ids: Iterable[UUID] | Filter,
        *,
        dry_run: bool = False,
        background: bool = False,
        progress: Progress | None = None,
        actor: str | None = None,
        reason: str | None = None,
        shard: str | None = None,
    ) -> Operation:
        """Make notifications due now, with attempts and retention reset. Returns the recorded operation.

        ``ids``: the ids of notifications, or a :class:`Filter`. A filter without states selects DEAD, EXPIRED and
        FAILED notifications. A notification that parks an ordering key runs again, and the key resumes if it succeeds.

        Everything that matches a filter changes in chunks of 1,000. Notifications that change after the call do not
        match. ``progress`` is called with the operation after each chunk. If the process dies, a process in
        ``running()`` resumes the operation within a minute. Cancelling the call stops the operation. With
        ``background=True`` the call returns immediately: a process in ``running()`` does the work, and
        :meth:`operation` shows its progress.

        ``dry_run=True`` changes and records nothing: ``matched`` is the number of notifications that would change,
        counted up to 100,000.

        Raises :class:`SelfDeadlock` for the notification of the transactional handler that makes the call.

        Example::

            operation = await outbox.admin.retry([dead.id], actor="ada", reason="the PDF service is back")
            print(operation.done)

            failed = Filter(states=("DEAD",), handler="invoice-pdf", error="ConnectionError")
            print((await outbox.admin.retry(failed, dry_run=True)).matched)
            await outbox.admin.retry(failed, progress=lambda operation: print(operation.done))
        """
        call = _Call("retry", TO_RETRY, dry_run, background, progress, shard)
        return await self._change(call, ids, actor, reason)

    async def skip(
        self,
        ids: Iterable[UUID] | Filter,
        *,
        dry_run: bool = False,
        background: bool = False,
        progress: Progress | None = None,
        actor: str | None = None,
        reason: str | None = None,
        shard: str | None = None,
    ) -> Operation:
        """End notifications as SKIPPED, except those that succeeded. Returns the recorded operation.

        Skipping a notification that parks an ordering key resumes the key. The arguments are those of :meth:`retry`. A
        filter without states selects all notifications that are not SUCCEEDED or SKIPPED.

        Raises :class:`SelfDeadlock` for the notification of the transactional handler that makes the call.
        """
        call = _Call("skip", TO_SKIP, dry_run, background, progress, shard)
        return await self._change(call, ids, actor, reason)

    async def stop(
        self, id: UUID | str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> bool:
        """Stop a running operation after its current chunk. Returns True if the operation was running.

        Changed notifications stay changed.

        Example::

            for operation in await outbox.admin.operations():
                if not operation.has_ended:
                    await outbox.admin.stop(operation.id)
        """
        target, stopped = id_argument(id), False
        requested = self._recorder.request("stop", {"operation": str(target)}, actor, reason)

        async def change(one: AdminShard) -> int:
            nonlocal stopped
            if await one.database.operations.request_stop(self._namespace, target):
                stopped = True
                one.operation_requested(target)  # if its process is gone, the next process that fans out ends it
            return 0

        await self._recorder.carry_out(requested, shard, change)
        return stopped

    # --- inside ----------------------------------------------------------------------------------

    async def _change(
        self, call: _Call, ids: Iterable[UUID] | Filter, actor: str | None, reason: str | None
    ) -> Operation:
        if isinstance(ids, Filter):
            filter = filter_argument(ids, states=call.states)
            requested = self._recorder.request(call.kind, {"filter": as_request(filter)}, actor, reason)
            await self._refuse_unknown(filter, call.shard)
            if call.dry_run:
                return await self._count(requested, filter, call.shard)
            return await self._change_all(requested, filter, call)
        chosen = ids_argument(ids, call.kind)
        request = {"ids": [str(id) for id in chosen[:_RECORDED_IDS]], "number": len(chosen)}
        requested = self._recorder.request(call.kind, request, actor, reason)
        if call.dry_run:
            found = [await self._counts(one, call.kind, chosen) for one in self._shards.chosen(call.shard)]
            return self._dry(requested, sum(one.matched for one in found), sum(one.done for one in found), call.shard)
        return await self._change_some(requested, chosen, call.shard)

    async def _change_some(self, requested: OperationRequest, ids: Sequence[UUID], shard: str | None) -> Operation:
        """Change single notifications."""
        refuse_claimed(requested.call, ids)

        async def change(one: AdminShard) -> ChangeCounts:
            now, matched = await one.now(), (await self._counts(one, requested.kind, ids)).matched
            notifications = one.database.stored_notifications
            change = notifications.retry if requested.kind == "retry" else notifications.skip
            done = await change(self._namespace, ids, now)
            return ChangeCounts(max(matched, done), done)

        return added_up(await self._recorder.carry_out(requested, shard, change))

    async def _change_all(self, requested: OperationRequest, filter: Filter, call: _Call) -> Operation:
        """Change everything that matches, in chunks."""
        chosen = self._shards.to_write(requested.call, call.shard)
        if not call.background:
            refuse_in_claiming_transaction(requested.call)
        worker = NOBODY if call.background else f"{self._recorder.worker}:{requested.id.hex[-8:]}"
        runs = [await self._begin(requested, filter, one, worker) for one in chosen]
        if call.background:
            for one in chosen:
                one.operation_requested(requested.id)
        else:
            try:
                await _run_all(runs, call.progress)
            except BaseException:
                await run_to_completion(_stop(runs))
                raise
        return added_up([run.operation for run in runs])

    async def _begin(self, requested: OperationRequest, filter: Filter, one: AdminShard, worker: str) -> BulkRun:
        end = self._setup.cutoffs.next(one.database.name, await one.now())
        search = await search_of(frozen(filter, end), one.database, self._known, self._types)
        stored: object = msgspec.json.decode(msgspec.json.encode(search))
        requested = replace(requested, request={**requested.request, "search": stored})
        operation = await self._recorder.begin(requested, one, worker)
        return BulkRun(self._namespace, one, worker, Taken(operation, None), self._redact)

    async def _count(self, requested: OperationRequest, filter: Filter, shard: str | None) -> Operation:
        matched, is_complete = 0, True
        for one in self._shards.chosen(shard):
            search = await search_of(filter, one.database, self._known, self._types)
            counted = await one.database.search.count(
                self._namespace, search, COUNTED_IN_DRY_RUN, reads=2 * COUNTED_IN_DRY_RUN
            )
            matched += counted.number
            is_complete &= counted.is_complete
        return replace(self._dry(requested, matched, matched, shard), is_complete=is_complete)

    async def _counts(self, one: AdminShard, kind: str, ids: Sequence[UUID]) -> ChangeCounts:
        """Count the ids that exist on a shard, and those that the operation can change."""
        states = await one.database.operations.states(self._namespace, ids)
        return ChangeCounts(len(states), sum(state not in _REFUSED[kind] for state in states.values()))

    def _dry(self, requested: OperationRequest, matched: int, possible: int, shard: str | None) -> Operation:
        """Return the result of a dry run. ``possible``: the number of notifications that can be changed."""
        chosen = self._shards.chosen(shard)
        now = chosen[0].clock()
        operation = requested.operation(now, ", ".join(one.database.name for one in chosen))
        return replace(
            operation, state=OperationState.DONE, matched=matched, refused=matched - possible, finished_date=now,
            is_dry_run=True,
        )  # fmt: skip

    async def _refuse_unknown(self, filter: Filter, shard: str | None) -> None:
        """Refuse a misspelt handler or event type, before anything is written."""
        databases = self._shards.databases(shard)
        if filter.handler is not None:
            await self._known.refuse_unknown(filter.handler, databases, among_rows=True)
        if filter.event_type is not None:
            await self._known.refuse_unknown_type(filter.event_type, databases)


async def _run_all(runs: Sequence[BulkRun], progress: Progress | None) -> None:
    for run in runs:
        while not run.operation.has_ended:
            if run.is_ours:
                await _step(run)
            else:
                await asyncio.sleep(_FOLLOW_DELAY)
                await run.look()
            if progress is not None:
                progress(added_up([each.operation for each in runs]))


async def _step(run: BulkRun) -> None:
    """Process a chunk, and retry after transient errors."""
    for tries in range(1, _MAX_TRIES + 1):
        try:
            await run.step()
            return
        except Exception as error:
            if tries == _MAX_TRIES or not run.database.is_transient(error):
                raise
            await asyncio.sleep(pause_after(tries))


async def _stop(runs: Sequence[BulkRun]) -> None:
    """Stop the runs of a call that was cancelled or failed. If the database is down, another process resumes them."""
    for run in runs:
        try:
            await run.stop()
        except Exception as error:  # the error or the cancellation that ended the call matters
            id = run.operation.id
            logger.warning("cannot stop operation %s: %s", id, error, operation=str(id))
