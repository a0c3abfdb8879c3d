"""Recording of events in transactions that your application commits: ``Outbox.record`` and ``Outbox.bind``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outboxio.actions.executor import ActionExecutor, WritableShard, current_cause
from outboxio.errors import ConfigurationError
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.payloads.classes import AnyEvent, named_by
from outboxio.runtime.environment import OwnConnections, is_of_sqlalchemy
from outboxio.support.ids import uuid7

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from outboxio.integrations.sessions import SessionEvents


class Recording:
    """The base class of :class:`~outboxio.Outbox` that writes events in transactions of your application."""

    def __init__(
        self,
        executor: ActionExecutor,
        own_connections: OwnConnections,
        shards: Sequence[WritableShard],
        guard: EventLoopGuard,
    ) -> None:
        self._executor = executor
        self._own_connections = own_connections
        self._bound_sessions = BoundSessions(executor, own_connections)
        self._written_shards = shards
        self._one_loop = guard

    async def record(
        self,
        connection: Any,
        *events: AnyEvent,
        action: str,
        params: Any = None,
        model: object = None,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Write events inside an open transaction of your application. Returns the id of the action.

        ``connection``: an asyncpg, aiomysql or asyncmy connection, a ``psycopg.AsyncConnection``, a ``sqlite3`` or
        ``aiosqlite`` connection, or a SQLAlchemy ``AsyncSession`` or ``AsyncConnection``. Your application commits, and
        may call :meth:`wake` after the commit; otherwise the loops find the events by polling. The other parameters are
        those of ``tx.emit`` and apply to all ``events``.

        Raises :class:`NoTransaction` if no transaction is open on the connection, :class:`WrongDatabase` if the
        connection is to a different database than the shard. Each connection is checked once, on its first use, which
        takes an additional round trip.

        Example::

            async with connection.transaction():
                await connection.execute("UPDATE wallets ...")
                await outbox.record(connection, MoneyDeposited(wallet_id, amount), action="Deposit")
            outbox.wake()
        """
        target = self._executor.shard(shard)
        if model is not None:
            model_id, model_type = named_by(model, model_id, model_type)
        records = [
            target.emitter.record(
                event,
                current_cause(),
                model_id=model_id,
                model_type=model_type,
                ordering_key=ordering_key,
                topic=topic,
                available_at=available_at,
            )
            for event in events
        ]
        session = await self._own_connections.session_on(target, connection)
        return await self._executor.record(
            target, session, action, params, records, correlation_id=correlation_id, headers=headers
        )

    def bind(
        self,
        session: AsyncSession | async_scoped_session[Any],
        *,
        action: str | None = None,
        params: Any = None,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> BoundSession:
        """Record events in a SQLAlchemy session that your application commits: ``outbox.bind(session).emit(event)``.

        The events are written by a single INSERT just before the COMMIT of the session, and the loops are woken after
        the COMMIT. A rollback drops the events, and so does ``close()`` without a commit. Rolling back to a savepoint
        drops the events emitted since. ``action``, ``params``, ``correlation_id`` and ``headers`` are stored with each
        event. A call without these parameters continues the action of the previous call for this session; without a
        name the action is ``"session.commit"``.

        Raises :class:`ConfigurationError` for a synchronous session, for a session with two-phase commit, and for a
        session that is bound to a different outbox or shard. The commit raises :class:`WrongDatabase` if the session
        uses a different database than the shard.

        Example::

            async with maker.begin() as session:
                session.add(order)
                outbox.bind(session, action="PlaceOrder").emit(OrderPlaced(order.number))
        """
        described = ActionOfSession(action, params, correlation_id, headers)
        return self._bound_sessions.bind(session, self._executor.shard(shard), described)

    def wake(self) -> None:
        """Wake the loops of all processes after events were committed by :meth:`record`.

        Raises :class:`WrongEventLoop` outside of the event loop of the outbox.
        """
        self._one_loop.enter()
        for shard in self._written_shards:
            shard.committed()


UNNAMED = "session.commit"
"""The action name of session events without a named action. No class can have this name."""


class ActionOfSession:
    """An action as described by ``Outbox.bind``."""

    def __init__(
        self,
        name: str | None = None,
        params: object = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        self.is_empty = all(each is None for each in (name, params, correlation_id, headers))
        self.name = UNNAMED if name is None else name
        self.params = params
        self.correlation_id = correlation_id
        self.headers = headers


class _Emitted(NamedTuple):
    action: ActionRecord
    event: EventRecord


class SessionBuffer:
    """The events of a session for a shard, until the session commits."""

    def __init__(self, executor: ActionExecutor, target: WritableShard, own: OwnConnections) -> None:
        self._executor = executor
        self.target = target
        self._own = own
        self.named = ActionOfSession()
        """The action of events that are emitted without one."""
        self.events: list[_Emitted] = []
        self._written: list[EventRecord] = []
        self._actions: dict[ActionOfSession, ActionRecord] = {}

    def emit(self, event: AnyEvent, action: ActionOfSession | None = None, **options: Any) -> None:
        record = self.target.emitter.record(event, current_cause(), **options)
        self.events.append(_Emitted(self._record_of(action or self.named), record))

    async def write(self, driver: Any) -> None:
        session = await self._own.session_on(self.target, driver)
        while self.events:
            action, emitted = next(groupby(self.events, key=lambda emitted: emitted.action))
            written = [each.event for each in emitted]
            await self._executor.write(self.target, session, action, written)
            del self.events[: len(written)]  # your application may catch an error and commit again
            self._written += written

    def committed(self) -> None:
        if self._written:
            self.target.committed(self._written)

    def ended(self) -> None:
        self.events.clear()
        self._written = []
        self._actions.clear()

    def _record_of(self, action: ActionOfSession) -> ActionRecord:
        """Return the record of an action, creating it for its first event in the transaction."""
        if (record := self._actions.get(action)) is None:
            record = self._actions[action] = self._executor.action_record(
                self.target, action.name, action.params, action.headers, uuid7(), action.correlation_id, current_cause()
            )
        return record


class BoundSession:
    """The events of a SQLAlchemy session, from ``Outbox.bind``."""

    def __init__(self, session: AsyncSession, buffer: SessionBuffer, action: ActionOfSession) -> None:
        self._session = session
        self._buffer = buffer
        self._action = action

    def emit(
        self,
        event: AnyEvent,
        *,
        model: object = None,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> None:
        """Record an event that is committed together with the session. The parameters are those of ``tx.emit``.

        Outside of a transaction the call begins the transaction of the session, as ``session.add`` does. Raises
        :class:`InvalidEvent` if the event cannot be stored, and :class:`TransactionError` if the transaction of the
        session has failed, or has just committed.

        Example::

            outbox.bind(session).emit(OrderPaid(order.id), model_id=order.id, model_type="Order")
        """
        from outboxio.integrations.sessions import require_open

        session = self._session.sync_session
        events = require_open(session, "emit()")
        if model is not None:
            model_id, model_type = named_by(model, model_id, model_type)
        self._buffer.emit(
            event,
            self._action,
            model_id=model_id,
            model_type=model_type,
            ordering_key=ordering_key,
            topic=topic,
            available_at=available_at,
        )
        events.emitted(session)


class BoundSessions:
    """Creates the buffers of sessions. Each session holds its buffer."""

    def __init__(self, executor: ActionExecutor, own: OwnConnections) -> None:
        self._executor = executor
        self._own = own
        if "sqlalchemy.orm" in sys.modules:  # a commit listener of SQLAlchemy cannot add listeners
            from outboxio.integrations.sessions import listen

            listen()

    def bind(self, session: Any, target: WritableShard, action: ActionOfSession) -> BoundSession:
        """Bind a session. See ``Outbox.bind`` for the errors."""
        if not is_of_sqlalchemy(session):
            raise ConfigurationError(f"bind() was given {_class_of(session)}; give an AsyncSession of SQLAlchemy")
        from sqlalchemy.ext.asyncio import AsyncSession

        from outboxio.integrations.sessions import default_bind, events_of
        from outboxio.integrations.sqlalchemy import asynchronous

        async_session = asynchronous(session, "bind()")
        if not isinstance(async_session, AsyncSession):
            raise ConfigurationError(
                "bind() does not accept an AsyncConnection, which has no commit event: pass an AsyncSession, "
                "or use outbox.record(connection, ...) and outbox.wake()"
            )
        if async_session.sync_session.twophase:
            raise ConfigurationError(
                "bind() does not accept a session with twophase=True: events of a prepared transaction that is "
                "never committed would stay invisible. Use a session without two-phase commit, or outbox.record"
            )
        default_bind(async_session.sync_session)
        events = events_of(async_session.sync_session)
        buffer = self._buffer_of(events, target)
        if not action.is_empty:
            buffer.named = action
        return BoundSession(async_session, buffer, buffer.named)

    def _buffer_of(self, events: SessionEvents, target: WritableShard) -> SessionBuffer:
        if events.sink is None:
            events.sink = SessionBuffer(self._executor, target, self._own)
        if not isinstance(events.sink, SessionBuffer) or events.sink.target is not target:
            raise ConfigurationError(
                "the session is already bound to another outbox or shard: use one session for each, or "
                "outbox.record for the events of the second"
            )
        return events.sink


def _class_of(target: object) -> str:
    return f"{type(target).__module__}.{type(target).__qualname__}"
