"""The part of an outbox that writes events in transactions of the application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outboxio.actions.executor import ActionExecutor, WritableShard, current_cause
from outboxio.loops.owner import EventLoopGuard
from outboxio.payloads.classes import AnyEvent, named_by
from outboxio.runtime.own_connection import OwnConnections
from outboxio.runtime.recording.bound_session import ActionOfSession, BoundSession, BoundSessions

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session


class Recording:
    """The base class of :class:`~outboxio.Outbox` that writes events in transactions of the application."""

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
        """Write outbox rows inside a transaction that the application has open. Returns the action's id.

        ``connection``: an asyncpg or aiomysql connection, a ``sqlite3`` or ``aiosqlite`` connection, or a
        SQLAlchemy ``AsyncSession`` or ``AsyncConnection``. The application commits, and may call
        :meth:`wake` after its commit; otherwise the loops find the events by polling. The other
        parameters are those of ``tx.emit``, for all ``events``.

        Raises :class:`NoTransaction` if no transaction is open on the connection, :class:`OtherDatabase` if the
        connection is not of the shard's database: each connection is asked once, in a further round trip, at the first
        use.

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
        """The events of a SQLAlchemy session that the application commits: ``outbox.bind(session).emit(event)``.

        Just before the COMMIT of the session the events are written by a single INSERT, and the loops are waked after
        the COMMIT. A rollback drops the events, and so does ``close()`` without a commit; a savepoint that is rolled
        back drops the events that were emitted within. ``action``, ``params``, ``correlation_id`` and ``headers`` are
        stored with each event. A call without these parameters continues the action of the last call for this session;
        an action without a name is ``"session.commit"``.

        Raises :class:`ConfigurationError` for a synchronous session, for a session with two-phase commit, and for a
        session that is bound to a different outbox or shard. The commit raises :class:`OtherDatabase` if the session is
        of a different database than the shard.

        Example::

            async with maker.begin() as session:
                session.add(order)
                outbox.bind(session, action="PlaceOrder").emit(OrderPlaced(order.number))
        """
        described = ActionOfSession(action, params, correlation_id, headers)
        return self._bound_sessions.bind(session, self._executor.shard(shard), described)

    def wake(self) -> None:
        """Tell the loops of all processes that events were committed by :meth:`record`.

        Raises :class:`WrongEventLoop` where no event loop runs, or not the event loop of the outbox.
        """
        self._one_loop.enter()
        for shard in self._written_shards:
            shard.committed()
