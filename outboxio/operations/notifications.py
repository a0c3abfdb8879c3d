"""Bulk orders: everything that matches a filter is retried or skipped, in pieces (decision 44).

Each piece is a transaction that changes up to 1,000 notifications and writes the place that was reached into
``operations``. So a process that goes on after a crash begins right after the last piece, and no notification changes
twice.
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
from outboxio.operations.arguments import given_id, given_ids
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import TO_RETRY, TO_SKIP, as_request, frozen, given_filter, search_of
from outboxio.operations.recorder import AdminShard, Numbers, Order, added_up, after_error, log_end, naming_rights
from outboxio.storage.protocols import BulkOrder, Database, Taken
from outboxio.storage.tables.operations import NOBODY
from outboxio.support.aio import to_the_end
from outboxio.support.duration import pause_after
from outboxio.support.log import log_of

PIECE = 1000  # notifications


class BulkRun:
    """A bulk order on a shard, carried out by this process.

    Example::

        while run.is_ours and not run.operation.has_ended:
            await run.step()
    """

    def __init__(self, namespace: str, one: AdminShard, worker: str, taken: Taken, redact: Redact) -> None:
        """``worker``: the name under which this process has written or taken the operation."""
        self.operation = taken.operation
        """The operation, with the numbers so far."""
        self.is_ours = True
        """False if a second process has taken the operation: this process was silent for too long."""
        self._namespace = namespace
        self._one = one
        self._worker = worker
        self._reached = taken.reached
        self._redact = redact
        search = msgspec.convert(self.operation.request["search"], Search)
        kind: Literal["retry", "skip"] = "retry" if self.operation.kind == "retry" else "skip"
        self._order = BulkOrder(kind, self.operation.id, worker, search)

    @property
    def database(self) -> Database:
        return self._one.database

    async def step(self) -> None:
        """Do a piece, and end the operation after the last piece.

        An error that may pass leaves the operation RUNNING: call the method again, or leave the rest to a different
        process. Any other error ends the operation FAILED.
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
        """End the operation STOPPED, unless the operation has ended or is a different process's."""
        if self.is_ours and not self.operation.has_ended:
            await self._end(replace(self.operation, state=OperationState.STOPPED))

    async def look(self) -> None:
        """Read the operation that a different process carries out."""
        self.operation = await self.database.operations.get(self._namespace, self.operation.id) or self.operation

    async def _step(self) -> None:
        now = self._one.clock()
        piece = await self.database.search.change_piece(self._namespace, self._order, self._reached, PIECE, now)
        if not piece.is_ours:
            await self._lose()
            return
        so_far = self.operation
        self.operation = replace(
            so_far, matched=so_far.matched + piece.matched, done=so_far.done + piece.done,
            refused=so_far.refused + piece.refused, updated_date=now,
        )  # fmt: skip
        self._reached = piece.next
        if piece.done:
            self._one.wake()
        if piece.next is None:
            await self._end(replace(self.operation, state=OperationState.DONE))

    async def _lose(self) -> None:
        """The operation was stopped, or is a different process's now."""
        if await self.database.operations.is_to_stop(self._namespace, self.operation.id):
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


# --- the orders of an operator about notifications ------------------------------------------------
#
# The orders of an operator about notifications: single notifications, and everything that matches a filter.


logger = log_of(__name__)

Progress = Callable[[Operation], object]
"""Hears of a bulk order after each piece."""

COUNTED_IN_DRY_RUN = 100_000
_FOLLOW_DELAY = 0.5  # seconds between two looks at an operation that a different process carries out
_MOST_TRIES = 10  # of a piece that fails with an error that may pass
_RECORDED_IDS = 100  # ids of an order that its record has; the rest is a number

#: The states that an order cannot change.
_REFUSED: dict[str, Collection[State]] = {"retry": (), "skip": (State.SUCCEEDED, State.SKIPPED)}

Kind = Literal["retry", "skip"]


class _Call(Struct, frozen=True):
    """A call of ``retry`` or ``skip``."""

    kind: Kind
    states: tuple[State, ...]
    """The states of a filter without states."""
    dry_run: bool
    background: bool
    progress: Progress | None
    shard: str | None


class NotificationOrders(AdminBase):
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
        """Make notifications due now, with attempts and retention from the start. Returns the recorded operation.

        ``ids``: the ids of notifications, or a :class:`Filter`. A filter without states means DEAD, EXPIRED and FAILED
        notifications. A notification that parks an ordering key runs again, and the key goes on after a success.

        Everything that matches a filter changes in pieces of 1,000. Notifications that change after the call do not
        match. ``progress`` is called with the operation after each piece. If the process dies, a process in
        ``running()`` goes on within a minute. A call that is cancelled stops the operation. ``background=True`` returns
        at once: a process in ``running()`` does the work, and :meth:`operation` shows how far the work is.

        ``dry_run=True`` changes and records nothing: ``matched`` says how many notifications the order would reach,
        counted up to 100,000.

        Raises :class:`WaitsForItself` for the notification of the transactional handler that makes the call.

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
        """End notifications as SKIPPED, except notifications that succeeded. Returns the recorded operation.

        Behind a notification that parks an ordering key, the key goes on. The arguments are those of :meth:`retry`. A
        filter without states means everything but SUCCEEDED and SKIPPED notifications.

        Raises :class:`WaitsForItself` for the notification of the transactional handler that makes the call.
        """
        call = _Call("skip", TO_SKIP, dry_run, background, progress, shard)
        return await self._change(call, ids, actor, reason)

    async def stop(
        self, id: UUID | str, *, actor: str | None = None, reason: str | None = None, shard: str | None = None
    ) -> bool:
        """Stop an operation under way after the piece that is being done. True if the operation was under way.

        Changed notifications stay changed.

        Example::

            for operation in await outbox.admin.operations():
                if not operation.has_ended:
                    await outbox.admin.stop(operation.id)
        """
        wanted, stopped = given_id(id), False
        order = self._recorder.order("stop", {"operation": str(wanted)}, actor, reason)

        async def change(one: AdminShard) -> int:
            nonlocal stopped
            if await one.database.operations.order_stop(self._namespace, wanted):
                stopped = True
                one.operation_ordered(wanted)  # an operation without a process is ended by the next that fans out
            return 0

        await self._recorder.carry_out(order, shard, change)
        return stopped

    # --- inside ----------------------------------------------------------------------------------

    async def _change(
        self, call: _Call, ids: Iterable[UUID] | Filter, actor: str | None, reason: str | None
    ) -> Operation:
        if isinstance(ids, Filter):
            filter = given_filter(ids, states=call.states)
            order = self._recorder.order(call.kind, {"filter": as_request(filter)}, actor, reason)
            await self._refuse_unknown(filter, call.shard)
            if call.dry_run:
                return await self._count(order, filter, call.shard)
            return await self._change_all(order, filter, call)
        chosen = given_ids(ids, call.kind)
        request = {"ids": [str(id) for id in chosen[:_RECORDED_IDS]], "number": len(chosen)}
        order = self._recorder.order(call.kind, request, actor, reason)
        if call.dry_run:
            found = [await self._numbers(one, call.kind, chosen) for one in self._shards.chosen(call.shard)]
            return self._dry(order, sum(one.matched for one in found), sum(one.done for one in found), call.shard)
        return await self._change_some(order, chosen, call.shard)

    async def _change_some(self, order: Order, ids: Sequence[UUID], shard: str | None) -> Operation:
        """Change single notifications, at once."""
        refuse_claimed(order.call, ids)

        async def change(one: AdminShard) -> Numbers:
            now, matched = await one.now(), (await self._numbers(one, order.kind, ids)).matched
            notifications = one.database.stored_notifications
            change = notifications.retry if order.kind == "retry" else notifications.skip
            done = await change(self._namespace, ids, now)
            return Numbers(max(matched, done), done)

        return added_up(await self._recorder.carry_out(order, shard, change))

    async def _change_all(self, order: Order, filter: Filter, call: _Call) -> Operation:
        """Change everything that matches, in pieces."""
        chosen = self._shards.to_write(order.call, call.shard)
        if not call.background:
            refuse_in_claiming_transaction(order.call)
        worker = NOBODY if call.background else f"{self._recorder.worker}:{order.id.hex[-8:]}"
        runs = [await self._begin(order, filter, one, worker) for one in chosen]
        if call.background:
            for one in chosen:
                one.operation_ordered(order.id)
        else:
            try:
                await _to_their_end(runs, call.progress)
            except BaseException:
                await to_the_end(_stop(runs))
                raise
        return added_up([run.operation for run in runs])

    async def _begin(self, order: Order, filter: Filter, one: AdminShard, worker: str) -> BulkRun:
        end = self._setup.ends.next(one.database.name, await one.now())
        search = await search_of(frozen(filter, end), one.database, self._known, self._types)
        stored: object = msgspec.json.decode(msgspec.json.encode(search))
        order = replace(order, request={**order.request, "search": stored})
        operation = await self._recorder.begin(order, one, worker)
        return BulkRun(self._namespace, one, worker, Taken(operation, None), self._redact)

    async def _count(self, order: Order, filter: Filter, shard: str | None) -> Operation:
        matched, is_complete = 0, True
        for one in self._shards.chosen(shard):
            search = await search_of(filter, one.database, self._known, self._types)
            counted = await one.database.search.count(
                self._namespace, search, COUNTED_IN_DRY_RUN, reads=2 * COUNTED_IN_DRY_RUN
            )
            matched += counted.number
            is_complete &= counted.is_complete
        return replace(self._dry(order, matched, matched, shard), is_complete=is_complete)

    async def _numbers(self, one: AdminShard, kind: str, ids: Sequence[UUID]) -> Numbers:
        """How many of the ids exist on a shard, and how many of these an order can change."""
        states = await one.database.operations.states(self._namespace, ids)
        return Numbers(len(states), sum(state not in _REFUSED[kind] for state in states.values()))

    def _dry(self, order: Order, matched: int, possible: int, shard: str | None) -> Operation:
        """The answer to a dry run. ``possible``: the notifications that the order can change."""
        chosen = self._shards.chosen(shard)
        now = chosen[0].clock()
        operation = order.operation(now, ", ".join(one.database.name for one in chosen))
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


async def _to_their_end(runs: Sequence[BulkRun], progress: Progress | None) -> None:
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
    """Do a piece, and try again after an error that may pass."""
    for tries in range(1, _MOST_TRIES + 1):
        try:
            await run.step()
            return
        except Exception as error:
            if tries == _MOST_TRIES or not run.database.is_transient(error):
                raise
            await asyncio.sleep(pause_after(tries))


async def _stop(runs: Sequence[BulkRun]) -> None:
    """Stop a bulk order whose call was cancelled, or has failed. If the database is gone, a second process goes on."""
    for run in runs:
        try:
            await run.stop()
        except Exception as error:  # the error or the cancellation that ended the call matters
            id = run.operation.id
            logger.warning("operation %s could not be stopped: %s", id, error, operation=str(id))
