"""Handler transactions commit the claim, the handler's SQL and events, and the new state of the rows together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from outboxio.errors import CommitUnknown, HandlerNotStarted
from outboxio.model.envelope import HandlerContext
from outboxio.model.event import ActionRecord
from outboxio.model.notification import State
from outboxio.runs.endings import EndUnknown, action_of, cancel_error
from outboxio.runs.opening import Claimer, Envelope, WorkResult
from outboxio.runs.run import BatchRun, Run
from outboxio.storage.protocols import Database, Session
from outboxio.support.aio import run_to_completion
from outboxio.support.clock import ShardClock
from outboxio.transaction import Transaction, enter_transaction, leave_transaction, roll_back

Work = Callable[[Run, Mapping[Run, Envelope]], Awaitable[WorkResult]]
"""Calls the handler, or the hooks, for the claimed rows of a run."""


class HandlerTransactions:
    """Runs each call of a transactional handler or hook in a new transaction."""

    def __init__(
        self,
        database: Database,
        clock: ShardClock,
        context: HandlerContext,
        claim: Claimer,
        emitted: Callable[[], None],
    ) -> None:
        """``emitted`` is called after a commit that wrote events."""
        self._database = database
        self._clock = clock
        self._context = context
        self._claim = claim
        self._emitted = emitted

    async def run(self, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State], work: Work) -> WorkResult:
        """Claim the rows in ``states``, do the work, and commit."""
        async with AsyncExitStack() as stack:
            session = await self._begin(run, stack)
            first = next(iter(envelopes.values()))
            record = action_of(run, first, self._clock)
            tx = Transaction(
                session, self._context.emitter, record, shard=self._context.shard, resources=self._context.resources,
                cause=first.cause, in_handler=True,
            )  # fmt: skip
            try:
                claimed = await self._claim.take(session, run, envelopes, states)
                tx.claimed = frozenset(row.notification.id for row in claimed)
                ended = await self._work_within(tx, run, claimed, work)
                await self._write(tx, run, record, claimed, ended)
                await self._claim.finish(session, claimed, ended)
            except BaseException:
                tx.abandon()
                await run_to_completion(roll_back(session))
                raise
            try:
                await tx.commit()
            except CommitUnknown as error:
                raise EndUnknown from error
            finally:
                # The rows are settled even if the run was cancelled during COMMIT.
                run.is_settled = tx.is_committed
                for row in claimed.keys() - ended.failed.keys():
                    row.is_settled = tx.is_committed
        if tx.events or tx.was_joined or any(envelope.emitted for envelope in claimed.values()):
            self._emitted()
        return ended

    async def _begin(self, run: Run, stack: AsyncExitStack) -> Session:
        """Open the transaction of a run. The clock of the handler starts when the connection is available."""
        try:
            session = run.session = await stack.enter_async_context(self._database.session())
            run.queue.starts_now(run, asyncio.get_running_loop().time())
            await session.begin()
        except Exception as error:
            raise HandlerNotStarted(run.queue.handler.name) from error
        return session

    async def _work_within(
        self, tx: Transaction, run: Run, envelopes: Mapping[Run, Envelope], work: Work
    ) -> WorkResult:
        """Do the work. A run that has exceeded its timeout raises instead of committing."""
        for envelope in envelopes.values():
            envelope.within(tx, shared=isinstance(run, BatchRun))
        token = enter_transaction(tx, self._context.outbox)
        try:
            ended = await work(run, envelopes)
            await tx.flush()
            tx.close()
        finally:
            leave_transaction(token)
        if run.cancelled_at is not None and not run.interrupted:
            raise cancel_error(run)
        return ended

    async def _write(
        self, tx: Transaction, run: Run, record: ActionRecord, envelopes: Mapping[Run, Envelope], ended: WorkResult
    ) -> None:
        """Write the emitted events. Each one is caused by the event of the envelope that emitted it."""
        if tx.events:
            first = next(iter(envelopes.values()))
            await tx.write(first.continues_trace(record.completed(self._clock())), tx.events)
        for row, envelope in envelopes.items():
            if envelope.emitted and row not in ended.failed:
                action = action_of(run, envelope, self._clock).completed(self._clock())
                await tx.write(envelope.continues_trace(action), envelope.emitted)
        tx.require_open("a statement on envelope.tx.connection")
