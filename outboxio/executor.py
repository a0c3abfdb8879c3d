"""Executing: one action, one transaction, and its events written with it just before COMMIT."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID

from outboxio.action import Action, Performs, Result_co, Retries, Retry, RetryCounter, as_entries, cause_chain
from outboxio.clock import Clock
from outboxio.emission import Cause, Emitter, encode_headers, encode_params
from outboxio.envelope import current_envelope
from outboxio.errors import (
    CommitUnknown,
    ConfigurationError,
    InvalidEvent,
    NestedExecute,
    StaleRecord,
)
from outboxio.event import ActionRecord, EventRecord, checked_name, checked_text
from outboxio.ids import uuid7
from outboxio.outcome import shown
from outboxio.redaction import Redact, as_it_is
from outboxio.storage.protocols import Database, Session
from outboxio.transaction import Transaction, commit, open_transaction, roll_back
from outboxio.waiting import to_the_end

T = TypeVar("T")

logger = logging.getLogger(__name__)

_RETRIED_BY_DEFAULT = Retry(on=StaleRecord)


class WritableShard(Protocol):
    """One shard, as far as writing to it goes."""

    @property
    def database(self) -> Database: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def emitter(self) -> Emitter: ...

    def committed(self, events: Sequence[EventRecord] | None = None) -> None:
        """Told after each commit; with the events, unless they are not known."""


class ActionExecutor:
    """Runs actions: one execution is one transaction on one shard."""

    def __init__(
        self,
        namespace: str,
        shards: Mapping[str, WritableShard],
        *,
        resources: Any,
        record_empty_actions: bool,
        owner: object,
        redact: Redact = as_it_is,
    ) -> None:
        self._namespace = namespace
        self._shards = shards
        self._default_shard = next(iter(shards))
        self._resources = resources
        self._record_empty_actions = record_empty_actions
        self._owner = owner
        self._redact = redact

    async def execute(
        self,
        action: Performs[Result_co],
        *,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        retry: Retries = (),
    ) -> Result_co:
        """Run one action in one transaction; what its ``perform`` returned.

        ``shard`` names another shard than the first. ``correlation_id`` and ``headers`` are stored with each event
        and reach every handler. ``retry`` goes before the action's own. Stale records, serialization failures,
        deadlocks and busy databases are retried 3 times. Whatever ``perform`` raises passes through after a rollback;
        :class:`CommitUnknown` says that the connection was lost during COMMIT.

        Example::

            balance = await outbox.executor.execute(DepositMoney(wallet_id, Decimal("10.00")), correlation_id="req-7")
        """
        if not isinstance(action, Action):
            raise InvalidEvent("execute", f"{action!r} is no Action; define its class as `class X(Action)`")
        return await self.run(
            type(action).__type_name__,
            action,
            action.perform,
            shard=shard,
            correlation_id=correlation_id,
            headers=headers,
            retry=(*as_entries(retry), *as_entries(action.retry)),
        )

    async def run(
        self,
        name: str,
        params: object,
        perform: Callable[[Transaction], Awaitable[T]],
        *,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        retry: Sequence[Retry] = (),
        source: str | None = None,
    ) -> T:
        """Run ``perform`` in one transaction, again if it may be tried again; what it returned."""
        self.refuse_nesting(name)
        target = self.shard(shard)
        action_id = uuid7()
        retries: RetryCounter | None = None  # most succeed at once
        while True:
            try:
                async with self.transaction(
                    name, params, shard=shard, correlation_id=correlation_id, headers=headers, action_id=action_id,
                    source=source,
                ) as tx:  # fmt: skip
                    result = await _awaitable(perform(tx), name)
                return result
            except Exception as error:
                retries = retries or RetryCounter(retry, retried_by_default(target.database))
                if isinstance(error, CommitUnknown) or (delay := retries.delay_after(error)) is None:
                    raise
                logger.info(
                    "%s failed with %s and is run again in %.0f ms", name, shown(error, self._redact), delay * 1000,
                    extra={"action_name": name, "action_id": str(action_id)},
                )  # fmt: skip
            await asyncio.sleep(delay)

    @asynccontextmanager
    async def transaction(
        self,
        action_name: str,
        params: object = None,
        *,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        action_id: UUID | None = None,
        source: str | None = None,
    ) -> AsyncGenerator[Transaction]:
        """Open a transaction, and commit it with its events when the block ends; roll back if it raises."""
        self.refuse_nesting(action_name)
        target = self.shard(shard)
        cause = current_cause()
        begun = target.clock()
        record = self.action_record(
            target.emitter, action_name, params, headers, action_id or uuid7(), correlation_id, cause, begun, source
        )
        tx: Transaction | None = None
        try:
            async with target.database.session() as session:
                await session.begin(soon=True)
                tx = Transaction(
                    session,
                    target.emitter,
                    action_id=record.action_id,
                    action_name=action_name,
                    now=begun,
                    shard=target.database.name,
                    resources=self._resources,
                    cause=cause,
                )
                token = open_transaction.set((self._owner, tx))
                try:
                    yield tx
                    tx.close()
                    tx.require_open("a statement on tx.connection")
                except BaseException:
                    tx.abandon()
                    await to_the_end(roll_back(session))
                    raise
                finally:
                    open_transaction.reset(token)
                try:
                    rows = record.completed(target.clock()), self._events_of(tx)
                    await commit(session, tx, *rows)
                except Exception as error:
                    await _explain(target, error)
                    raise
        finally:
            # Even if this task was cancelled meanwhile: what is committed waits to be fanned out.
            if tx is not None and tx.is_committed and (tx.events or tx.has_parts):
                target.committed(None if tx.has_parts else tx.events)

    async def join(self, tx: Transaction, action: Performs[Result_co]) -> Result_co:
        """Run an action in a handler's open transaction: it commits with it, or not at all. Never retried by itself."""
        if not isinstance(action, Action):
            raise InvalidEvent("execute", f"{action!r} is no Action; define its class as `class X(Action)`")
        name, target = type(action).__type_name__, self.shard(tx.shard)
        begun = target.clock()
        record = self.action_record(target.emitter, name, action, None, uuid7(), None, current_cause(), begun)
        part = tx.part(action_id=record.action_id, action_name=name, now=begun)
        token = open_transaction.set((self._owner, part))
        try:
            result: Result_co = await _awaitable(action.perform(part), name)
            part.close()
            await self._write(target, part, record)
            return result
        except BaseException:
            part.abandon()
            raise
        finally:
            open_transaction.reset(token)

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
        """Write the rows of one action inside a transaction that the caller has open; the action's id."""
        record = self.action_record(
            target.emitter, action_name, params, headers, uuid7(), correlation_id, current_cause(), target.clock(),
            source,
        )  # fmt: skip
        tx = Transaction(
            session, target.emitter, action_id=record.action_id, action_name=action_name, now=record.started_date,
            shard=target.database.name, resources=None, cause=None,
        )  # fmt: skip
        tx.events.extend(events)
        await self._write(target, tx, record)
        return record.action_id

    def shard(self, name: str | None) -> WritableShard:
        """The shard with this name, or the first one; :class:`ConfigurationError` lists those that there are."""
        found = self._shards.get(self._default_shard if name is None else name)
        if found is None:
            raise ConfigurationError(f"there is no shard {name!r}; the shards are {', '.join(map(repr, self._shards))}")
        return found

    def refuse_nesting(self, action_name: str) -> None:
        """Raise :class:`NestedExecute` inside another transaction of this outbox."""
        enclosing = open_transaction.get()
        if enclosing is not None and enclosing[0] is self._owner and not enclosing[1].is_closed:
            raise NestedExecute(enclosing[1].action_name, action_name, in_handler=enclosing[1].in_handler)

    def action_record(
        self,
        emitter: Emitter,
        action_name: str,
        params: object,
        headers: Mapping[str, Any] | None,
        action_id: UUID,
        correlation_id: str | None,
        cause: Cause | None,
        begun: datetime,
        source: str | None = None,
    ) -> ActionRecord:
        """What the rows of this execution share; refuses here, before anything is sent, what cannot be stored."""
        if correlation_id is not None:
            checked_text(correlation_id, f"correlation_id of {action_name}")
        elif cause is not None:
            correlation_id = cause.correlation_id
        return ActionRecord(
            namespace=self._namespace,
            action_id=action_id,
            action_name=checked_name(action_name, "action_name"),
            action_params=encode_params(params, action_name, stores_nul=emitter.stores_nul),
            started_date=begun,
            completion_date=begun,
            source=source,
            correlation_id=correlation_id,
            causation_id=None if cause is None else cause.event_id,
            headers=encode_headers(headers, action_name, stores_nul=emitter.stores_nul),
            hops=0 if cause is None else cause.hops + 1,
        )

    async def _write(self, target: WritableShard, tx: Transaction, record: ActionRecord) -> None:
        """Write the rows of an action that does not end its transaction."""
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
        """What an action has emitted, or the sentinel of one that has emitted nothing."""
        return tx.events or ([EventRecord(id=uuid7())] if self._record_empty_actions else ())


async def _explain(target: WritableShard, error: Exception) -> None:
    """Where tables are missing, or are not as they should be, raise what says so."""
    if target.database.lacks_schema(error):
        await target.database.schema.check()


def _awaitable(performing: Awaitable[T], name: str) -> Awaitable[T]:
    if not inspect.isawaitable(performing):  # callers may not be typed
        raise TypeError(f"perform of {name} is no async method: write `async def perform(self, tx)`")
    return performing


def retried_by_default(database: Database) -> Callable[[BaseException], Retry | None]:
    """Which failures are retried without being asked for: stale records, and what the database calls transient."""

    def entry(error: BaseException) -> Retry | None:
        retried = any(
            isinstance(e, StaleRecord) or database.is_transient(e) or _is_stale_data(e) for e in cause_chain(error)
        )
        return _RETRIED_BY_DEFAULT if retried else None

    return entry


def current_cause() -> Cause | None:
    """What caused the rows that are written here: the event whose handler is running."""
    envelope = current_envelope.get()
    return None if envelope is None else envelope.cause


def _is_stale_data(error: BaseException) -> bool:
    """SQLAlchemy's own word for a stale record, recognised without importing SQLAlchemy."""
    return any(f"{c.__module__}.{c.__qualname__}" == "sqlalchemy.orm.exc.StaleDataError" for c in type(error).__mro__)
