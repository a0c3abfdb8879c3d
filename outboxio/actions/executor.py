"""Executing actions: an action runs in a transaction, and its events are written just before COMMIT.

A call that would deadlock, because it waits for the enclosing handler or transaction of the same outbox to end, is
refused. Tasks inherit the context variables that record both, so a call in such a task is refused, too, until the
handler or the transaction has ended, because the handler may be waiting for the task, as in ``asyncio.wait_for``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID

from msgspec.structs import replace

from outboxio.errors import CommitUnknown, ConfigurationError, NestedExecute, RightsMissing, SelfDeadlock, StaleRecord
from outboxio.loops.log_limiter import LogLimiter
from outboxio.model.action import (
    Performs,
    Result_co,
    Retries,
    Retry,
    RetryCounter,
    as_entries,
    cause_chain,
    name_and_retries,
)
from outboxio.model.emitter import Cause, Emitter
from outboxio.model.envelope import current_envelope, handler_around, leave_handlers
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.redaction import Redact, keep_all
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import Database, Session
from outboxio.support import machine
from outboxio.support.aio import run_to_completion
from outboxio.support.clock import Clock
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of, log_text, type_name
from outboxio.support.machine import in_forked_children
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import Execution, TelemetryChoice
from outboxio.transaction import (
    Transaction,
    enclosing_transactions,
    enter_transaction,
    leave_transaction,
    opens_transaction,
    roll_back,
)

T = TypeVar("T")

logger = log_of(__name__)

_RETRIED_BY_DEFAULT = Retry(on=StaleRecord)


class WritableShard(Protocol):
    """The parts of a shard that writing needs."""

    @property
    def database(self) -> Database: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def emitter(self) -> Emitter: ...

    @property
    def statistics(self) -> ShardStatistics: ...

    def committed(self, events: Sequence[EventRecord] | None = None) -> None:
        """Called after each commit that wrote events; ``None`` if joined actions may have written events, too."""


class ActionExecutor:
    """Runs actions: each execution is a transaction on a shard."""

    def __init__(
        self,
        namespace: str,
        shards: Mapping[str, WritableShard],
        *,
        resources: Any,
        record_empty_actions: bool,
        owner: object,
        redact: Redact = keep_all,
        telemetry: TelemetryChoice | None = None,
    ) -> None:
        self._namespace = namespace
        self._shards = shards
        self._default_shard = next(iter(shards))
        self._resources = resources
        self._record_empty_actions = record_empty_actions
        self._owner = owner
        self._redact = redact
        self._limiter = LogLimiter(logger)
        self.telemetry = telemetry or TelemetryChoice()

    async def execute(
        self,
        action: Performs[Result_co],
        *,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        retry: Retries = (),
    ) -> Result_co:
        """Run an action in a transaction, and return the result of ``perform``.

        The action runs on ``shard``, or on the first shard. ``correlation_id`` and ``headers`` are stored with each
        event and passed to every handler. In a handler, ``correlation_id`` defaults to that of the handler's event; in
        a request with ``OriginMiddleware``, both default to those of the request. ``retry`` takes precedence over the
        action's own. Stale records, serialization failures, deadlocks, busy databases and tables that changed during
        the transaction are retried 3 times. An error of ``perform`` is raised after a rollback. Other errors:

        * :class:`DatabaseUnavailable`: the database is unreachable, unresponsive, or read-only. The action is not
          committed.
        * :class:`CommitUnknown`: the connection was lost during COMMIT.
        * :class:`PoolExhausted`: no connection became free within the setting ``pool_timeout``.

        Example::

            balance = await outbox.executor.execute(DepositMoney(wallet_id, Decimal("10.00")), correlation_id="req-7")
        """
        name, own_entries = name_and_retries(action)
        action_id, entries = uuid7(), (*as_entries(retry), *own_entries)
        retries: RetryCounter | None = None  # most actions succeed at once
        with self.executing(name, shard, headers) as execution:
            while True:
                try:
                    async with self.attempt(
                        name, action, shard=shard, correlation_id=correlation_id, headers=headers, action_id=action_id
                    ) as tx:
                        result: Result_co = await _awaitable(action.perform(tx), name)
                    return result
                except Exception as error:
                    retries = retries or self.retries(entries, shard)
                    if (delay := self.delay_before_retry(retries, error, name, action_id, shard)) is None:
                        raise
                await asyncio.sleep(delay)
                execution.repeated()

    def executing(self, action_name: str, shard: str | None, headers: Mapping[str, Any] | None) -> Execution:
        """Return the telemetry context of all runs of an action."""
        return self.telemetry.chosen.executing(self._namespace, shard or self._default_shard, action_name, headers)

    def retries(self, entries: Sequence[Retry], shard: str | None = None) -> RetryCounter:
        """Return a counter of failed runs: by ``entries``, then by the failures that are always retried."""
        return RetryCounter(entries, retried_by_default(self.shard(shard).database))

    def delay_before_retry(
        self, retries: RetryCounter, error: Exception, action_name: str, action_id: UUID, shard: str | None
    ) -> float | None:
        """Return the seconds to wait before the next run, which is logged; ``None`` if ``error`` is final."""
        if isinstance(error, CommitUnknown) or (delay := retries.delay_after(error)) is None:
            return None
        key = (action_name, type_name(error))
        if self._limiter.admits(key, logging.INFO):
            self._limiter.log(
                key, logging.INFO, "action %r failed with %s; retrying in %.0f ms",
                action_name, log_text(error, self._redact), delay * 1000,
                namespace=self._namespace, shard=shard or self._default_shard, action=action_name, action_id=action_id,
                error_type=type_name(error),
            )  # fmt: skip
        return delay

    @opens_transaction
    async def transaction(
        self,
        action_name: str,
        params: object = None,
        *,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Transaction]:
        """Open a transaction. The end of the block commits it with the events; an error in the block rolls it back."""
        with self.executing(action_name, shard, headers):
            async with self.attempt(
                action_name, params, shard=shard, correlation_id=correlation_id, headers=headers, action_id=uuid7()
            ) as tx:
                yield tx

    @asynccontextmanager
    async def attempt(
        self,
        action_name: str,
        params: object,
        *,
        shard: str | None,
        correlation_id: str | None,
        headers: Mapping[str, Any] | None,
        action_id: UUID,
        source: str | None = None,
    ) -> AsyncGenerator[Transaction]:
        """A run of an action, in a new transaction."""
        self.refuse_nesting(action_name)
        target = self.shard(shard)
        cause = current_cause()
        record = self.action_record(target, action_name, params, headers, action_id, correlation_id, cause, source)
        tx: Transaction | None = None
        outcome = "refused"
        try:
            async with target.database.session() as session:
                await session.begin(soon=True)
                tx = Transaction(
                    session, target.emitter, record, shard=target.database.name, resources=self._resources, cause=cause
                )
                token = enter_transaction(tx, self._owner)
                try:
                    yield tx
                    await tx.flush()
                    tx.close()
                    tx.require_open("a statement on tx.connection")
                except BaseException:
                    tx.abandon()
                    await run_to_completion(roll_back(session))
                    raise
                finally:
                    leave_transaction(token)
                record, events = record.completed(target.clock()), self._events_of(tx)
                sending = self.telemetry.chosen.sending(tx.shard, record, events)
                began = machine.perf_counter()
                try:
                    with sending:
                        await tx.commit(sending.marked(record), events)
                except Exception as error:
                    outcome = "unknown" if isinstance(error, CommitUnknown) else outcome
                    await _explain(target, error)
                    raise
                target.statistics.sends.add(machine.perf_counter() - began)
        finally:
            # Also if this task was cancelled, because committed events wait for fan-out.
            _end(target, tx, action_name, outcome)

    async def join(self, tx: Transaction, action: Performs[Result_co]) -> Result_co:
        """Run an action in a handler's open transaction, and commit with it. It is retried only with the handler."""
        (name, _), target = name_and_retries(action), self.shard(tx.shard)
        record = self.action_record(target, name, action, None, uuid7(), None, current_cause())
        joined = tx.joined_by(record)
        token = enter_transaction(joined, self._owner)
        try:
            with self.telemetry.chosen.executing(self._namespace, tx.shard, name, None, joins=True):
                result: Result_co = await _awaitable(action.perform(joined), name)
                await joined.flush()
                joined.close()
                await self._write(target, joined, record)
            return result
        except BaseException:
            joined.abandon()
            raise
        finally:
            leave_transaction(token)
            tx.resume()

    async def record(
        self,
        target: WritableShard,
        session: Session,
        action_name: str,
        params: object,
        events: Sequence[EventRecord],
        *,
        correlation_id: str | None,
        headers: Mapping[str, Any] | None,
        source: str | None = None,
    ) -> UUID:
        """Write the rows of an action in the caller's open transaction. Returns the action's id."""
        record = self.action_record(
            target, action_name, params, headers, uuid7(), correlation_id, current_cause(), source
        )
        await self.write(target, session, record, events)
        return record.action_id

    async def write(
        self, target: WritableShard, session: Session, record: ActionRecord, events: Sequence[EventRecord]
    ) -> None:
        """Write the rows of an action in the caller's open transaction."""
        tx = Transaction(session, target.emitter, record, shard=target.database.name, resources=None, cause=None)
        tx.events.extend(events)
        await self._write(target, tx, record)

    async def within(
        self,
        target: WritableShard,
        session: Session,
        action_name: str,
        work: Callable[[Transaction, datetime], Awaitable[object]],
    ) -> None:
        """Run ``work``, which writes rows of outboxio, in the caller's open transaction."""
        record = self.action_record(target, action_name, {}, None, uuid7(), None, current_cause())
        tx = Transaction(session, target.emitter, record, shard=target.database.name, resources=None, cause=None)
        try:
            await work(tx, target.clock())
        except Exception as error:
            await _explain(target, error)
            raise

    def shard(self, name: str | None) -> WritableShard:
        """Return the shard with this name, or the first one. Raises :class:`ConfigurationError`, with all names."""
        if name is None:
            return self._shards[self._default_shard]
        found = self._shards.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        if found is None:
            shards = ", ".join(map(repr, self._shards))
            raise ConfigurationError(f"there is no shard {briefly(name)}; the shards are {shards}")
        return found

    def refuse_nesting(self, action_name: str) -> None:
        """Raise :class:`NestedExecute` inside an open transaction of this outbox."""
        for tx in enclosing_transactions():
            if tx.owner is self._owner:
                raise NestedExecute(tx.action_name, action_name, in_handler=tx.in_handler, is_reading=tx.is_reading)

    def action_record(
        self,
        target: WritableShard,
        action_name: str,
        params: object,
        headers: Mapping[str, Any] | None,
        action_id: UUID,
        correlation_id: str | None,
        cause: Cause | None,
        source: str | None = None,
    ) -> ActionRecord:
        """Return the columns shared by the rows of an execution. Raises :class:`InvalidEvent` for an invalid value."""
        record = target.emitter.action(
            self._namespace, target.clock(), action_name, params, action_id=action_id, cause=cause,
            correlation_id=correlation_id, headers=headers,
        )  # fmt: skip
        return record if source is None else replace(record, source=source)

    async def _write(self, target: WritableShard, tx: Transaction, record: ActionRecord) -> None:
        """Write the rows of an action that does not end the transaction."""
        events = self._events_of(tx)
        if not events:
            tx.require_open("a statement on tx.connection")
            return
        try:
            await tx.write(record.completed(target.clock()), events)
        except Exception as error:
            await _explain(target, error)
            raise

    def _events_of(self, tx: Transaction) -> Sequence[EventRecord]:
        """Return the emitted events of an action, or its sentinel event if it emitted none."""
        has_none = not (tx.events or tx.was_joined)
        return [EventRecord(id=uuid7())] if has_none and self._record_empty_actions else tx.events


def _end(target: WritableShard, tx: Transaction | None, action_name: str, outcome: str) -> None:
    """Count a finished transaction, and wake fan-out for its events. ``outcome``: used if nothing was committed."""
    if tx is not None and tx.is_committed:
        outcome = "committed"
        if tx.events or tx.was_joined:
            target.committed(None if tx.was_joined else tx.events)
    target.statistics.executed(action_name, outcome)


async def _explain(target: WritableShard, error: Exception) -> None:
    """Raise a :class:`SchemaError` if tables are missing or wrong.

    A database user that may only write events may not read the catalog; then the driver's error is raised.
    """
    if target.database.lacks_schema(error):
        with suppress(RightsMissing):
            await target.database.schema.check()


def _awaitable(performing: Awaitable[T], name: str) -> Awaitable[T]:
    if not inspect.isawaitable(performing):  # callers may not be typed
        raise TypeError(f"perform of {name} is not an async method: write `async def perform(self, tx)`")
    return performing


def retried_by_default(database: Database) -> Callable[[BaseException], Retry | None]:
    """Return the entry for failures that are always retried: stale records, and transient database errors."""

    def entry(error: BaseException) -> Retry | None:
        retried = any(
            isinstance(e, StaleRecord) or database.is_transient(e) or _is_stale_data(e) for e in cause_chain(error)
        )
        return _RETRIED_BY_DEFAULT if retried else None

    return entry


def current_cause() -> Cause | None:
    """Return the cause of rows that are written in this context: the event of the running handler."""
    envelope = current_envelope.get()
    return None if envelope is None else envelope.cause


def _is_stale_data(error: BaseException) -> bool:
    """True for SQLAlchemy's error for a stale record. SQLAlchemy is not imported."""
    return any(f"{c.__module__}.{c.__qualname__}" == "sqlalchemy.orm.exc.StaleDataError" for c in type(error).__mro__)


def refuse_in_handler(outbox: object, call: str, fix: str) -> None:
    """Raise :class:`SelfDeadlock` inside a handler of this outbox that has not ended."""
    envelope = handler_around(outbox)
    if envelope is not None:
        raise SelfDeadlock(call, f"handler {envelope.handler_name!r}", fix)


def refuse_in_transaction(outbox: object, call: str, fix: str, shards: Collection[str] | None = None) -> None:
    """Raise :class:`SelfDeadlock` inside an open transaction of this outbox, on ``shards`` or on any shard."""
    for tx in enclosing_transactions():
        if tx.owner is outbox and (shards is None or tx.shard in shards):
            raise SelfDeadlock(call, f"the transaction of {tx.action_name}", fix)


def refuse_claimed(call: str, ids: Collection[UUID]) -> None:
    """Raise :class:`SelfDeadlock` for rows that a transaction around this call has locked, of any outbox."""
    for tx in enclosing_transactions():
        for claimed in tx.claimed.intersection(ids):
            raise SelfDeadlock(
                f"{call} of notification {claimed}",
                f"the transaction of handler {tx.action_name!r}, which has locked its row,",
                "raise an error to retry it (RetryAfter at a given time, Unprocessable never), or return to finish it",
            )


def refuse_in_claiming_transaction(call: str) -> None:
    """Raise :class:`SelfDeadlock` if a transaction around this call has locked rows, which ``call`` may wait for."""
    for tx in enclosing_transactions():
        if tx.claimed:
            raise SelfDeadlock(
                call,
                f"the transaction of handler {tx.action_name!r}, which has locked its row,",
                "use background=True, or make the call after the transaction has ended",
            )


def _begin_child() -> None:
    """End the enclosing handler and transactions in a forked child: they continue only in the parent."""
    for tx in enclosing_transactions():
        tx.abandon()
    leave_handlers()


in_forked_children(_begin_child)
