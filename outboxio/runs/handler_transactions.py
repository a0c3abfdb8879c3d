"""Transactions of handlers: the claim, the handler's SQL and events, and the rows' new state commit together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from outboxio.errors import CommitUnknown, NotBegun
from outboxio.model.envelope import HandlerContext
from outboxio.model.event import ActionRecord
from outboxio.model.notification import State
from outboxio.runs.endings import EndUnknown, action_of, cancel_error
from outboxio.runs.opening import Claim, Envelope, WorkResult
from outboxio.runs.run import BatchRun, Run
from outboxio.storage.protocols import Database, Session
from outboxio.support.aio import to_the_end
from outboxio.support.clock import ShardClock
from outboxio.transaction import Transaction, roll_back, work_in, work_outside

Work = Callable[[Run, Mapping[Run, Envelope]], Awaitable[WorkResult]]
"""Calls the handler, or the hooks, for the claimed rows of a run."""


class HandlerTransactions:
    """Runs each transactional handler, and each hook, in a new transaction."""

    def __init__(
        self,
        database: Database,
        clock: ShardClock,
        context: HandlerContext,
        claim: Claim,
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
                await to_the_end(roll_back(session))
                raise
            try:
                await tx.commit()
            except CommitUnknown as error:
                raise EndUnknown from error
            finally:
                # The rows are settled even if a cancellation came during COMMIT.
                run.is_settled = tx.is_committed
                for row in claimed.keys() - ended.failed.keys():
                    row.is_settled = tx.is_committed
        if tx.events or tx.was_joined or any(envelope.emitted for envelope in claimed.values()):
            self._emitted()
        return ended

    async def _begin(self, run: Run, stack: AsyncExitStack) -> Session:
        """Open the run's transaction. The handler's time starts when the connection is there."""
        try:
            session = run.session = await stack.enter_async_context(self._database.session())
            run.queue.starts_now(run, asyncio.get_running_loop().time())
            await session.begin()
        except Exception as error:
            raise NotBegun(run.queue.handler.name) from error
        return session

    async def _work_within(
        self, tx: Transaction, run: Run, envelopes: Mapping[Run, Envelope], work: Work
    ) -> WorkResult:
        """Do the work. A run past the timeout raises instead of committing."""
        for envelope in envelopes.values():
            envelope.within(tx, shared=isinstance(run, BatchRun))
        token = work_in(tx, self._context.outbox)
        try:
            ended = await work(run, envelopes)
            await tx.flush()
            tx.close()
        finally:
            work_outside(token)
        if run.cancelled_at is not None and not run.interrupted:
            raise cancel_error(run)
        return ended

    async def _write(
        self, tx: Transaction, run: Run, record: ActionRecord, envelopes: Mapping[Run, Envelope], ended: WorkResult
    ) -> None:
        """Write the emitted events. The cause of each is the event of the emitting envelope."""
        if tx.events:
            first = next(iter(envelopes.values()))
            await tx.write(first.continues_trace(record.completed(self._clock())), tx.events)
        for row, envelope in envelopes.items():
            if envelope.emitted and row not in ended.failed:
                action = action_of(run, envelope, self._clock).completed(self._clock())
                await tx.write(envelope.continues_trace(action), envelope.emitted)
        tx.require_open("a statement on envelope.tx.connection")
