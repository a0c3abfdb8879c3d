"""The composition root: wires everything together, and is what an application holds."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from uuid import UUID

from msgspec import Struct

from outboxio.admin import Admin, AdminShard
from outboxio.calling import Counters
from outboxio.clock import Clock, ShardClock
from outboxio.consuming import InlineShard
from outboxio.duration import parse_duration
from outboxio.emission import Emitter
from outboxio.errors import ConfigurationError, DrainTimeout, NoTransaction, RegistrationError, SameDatabase
from outboxio.event import Event, EventTypes, checked_name
from outboxio.executor import ActionExecutor, WritableShard, current_cause
from outboxio.handler import (
    AnyHandlerFunction,
    EventHandler,
    HandlerRegistry,
    handler_from_object,
    make_handler,
    where_defined,
)
from outboxio.inbox import Inbox
from outboxio.names import LockName
from outboxio.options import DeadHook, HandlerKeywords, checked_hook
from outboxio.redaction import Redact, checked_redact
from outboxio.running import Running, Stay
from outboxio.settings import Settings
from outboxio.shard import Roles, ShardRuntime, ShardWork
from outboxio.storage import DatabaseSource, open_database
from outboxio.storage.protocols import ClusterLock, Session
from outboxio.transaction import Transaction
from outboxio.waiting import Exclusive, to_the_end

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=AnyHandlerFunction)

_FOR_EVER = timedelta(days=36_500)


class Drained(Struct, frozen=True):
    """What one ``drain()`` did in this process: events fanned out, and notifications by what became of them."""

    fanned_out: int
    succeeded: int
    failed: int
    expired: int
    dead: int


class Outbox:
    """Commits an application's own rows and the events that they cause together, and runs the handlers afterwards.

    ``database``: a URL (``postgresql://``, ``mysql://``, ``mariadb://``, ``sqlite:///file.db``, ``sqlite://`` in
    memory), a pool of asyncpg, aiomysql or asyncmy, or a mapping of shard names to either; the first is the default
    shard. Nothing is opened yet. What was given open is never closed. ``namespace`` names this service: two services
    in one database never see each other's events. ``clock`` is a callable that returns the present moment (tests);
    without it, the database's clock decides. ``resources`` is anything that actions and handlers should have at hand,
    as ``tx.resources`` and ``envelope.resources``. ``on_dead`` is an async function of (envelope, error), called
    for every notification that ends DEAD, or EXPIRED after a failure (see :meth:`handler`).

    ``redact`` is a function of a text that returns what may be kept of it, for what must not reach an operator's eyes:
    card numbers, tokens, names. It is given type, message and traceback of each error before they are stored, what log
    lines say of a failure, and the payloads, parameters, headers and errors that ``outbox.admin`` and the command line
    show, as JSON text. It is called when something failed or is looked at, never otherwise. If it fails, the text is
    left out altogether. Handlers get their events as they are.

    Raises :class:`ConfigurationError` for a database that it cannot make sense of.

    Example::

        outbox = Outbox("postgresql://localhost/app", namespace="wallets")

        @outbox.handler(MoneyDeposited, name="deposit-receipt")
        async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None: ...

        async with outbox.running():
            await outbox.executor.execute(DepositMoney(wallet_id, Decimal("10.00")))
    """

    def __init__(
        self,
        database: DatabaseSource | Mapping[str, DatabaseSource],
        *,
        namespace: str,
        settings: Settings | None = None,
        clock: Clock | None = None,
        resources: Any = None,
        on_dead: DeadHook | None = None,
        redact: Redact | None = None,
    ) -> None:
        self._on_dead = checked_hook(on_dead, "on_dead of the outbox")
        self._redact = checked_redact(redact)
        self.namespace = checked_name(namespace, "namespace")
        self.settings = settings if settings is not None else Settings()
        self.resources = resources
        self._types = EventTypes()
        self._handlers = HandlerRegistry(self._types)
        self._running: Running | None = None
        self._changing = Exclusive()  # entering, leaving and a drain of its own take turns
        self._owner = f"{socket.gethostname()[:100]}:{os.getpid()}:{secrets.token_hex(4)}"
        sources = database if isinstance(database, Mapping) else {"default": database}
        if not sources:
            raise ConfigurationError("database is an empty mapping; give at least one shard")
        self._shards = {checked_name(name, "shard name"): self._shard(name, s, clock) for name, s in sources.items()}
        self.executor = ActionExecutor(
            namespace,
            self._shards,
            resources=resources,
            record_empty_actions=self.settings.record_empty_actions,
            owner=self,
            redact=self._redact,
        )
        """Runs actions: ``await outbox.executor.execute(action)``."""
        self.inbox = Inbox(namespace, self.executor, self._session_on, self._inline)
        """Receives what brokers and webhooks deliver: ``await outbox.inbox.receive(...)``."""
        reached = {name: AdminShard(s.database, s.clock, s.became_due) for name, s in self._shards.items()}
        self.admin = Admin(namespace, reached, self.settings, self._handlers, self._redact)
        """What an operator asks and orders."""

    # --- handlers --------------------------------------------------------------------------------

    def handler(
        self,
        *event_types: type[Event],
        name: str,
        aliases: Iterable[str] = (),
        topic: str | None = None,
        **options: Unpack[HandlerKeywords],
    ) -> Callable[[F], F]:
        """Register an async function as the handler of events of these types, subclasses included.

        ``name`` is stored with every notification: treat it as part of your schema. To rename a handler, keep the old
        name in ``aliases`` until no unfinished rows are left under it. ``topic`` subscribes to everything that is
        emitted on that topic instead; event types then only say how payloads are decoded. The options are:

        ``retry`` is a :class:`RetryPolicy` or a callable of (attempts, exception). ``timeout`` (default: setting
        ``handler_timeout``) cancels a run that takes longer, which counts as a failure. ``concurrency`` limits how
        many run at once (default: the setting of that name; 1 with ``batch``).

        ``delivery`` says what a crash half-way does. ``"at_least_once"``: the handler runs again, so it must be
        idempotent. ``"transactional"``: it works in ``envelope.tx``, a transaction on the event's shard that commits
        together with the delivery, so its effects in that database happen exactly once. ``"at_most_once"``: it never
        runs a second time; a run that fails, or is cut short, ends DEAD.

        ``on_dead`` is an async function of (envelope, error), called when a notification ends DEAD, or EXPIRED after a
        failure; before that of the outbox. It works in ``envelope.tx``, and what it writes and emits commits together
        with that end. If it fails, the verdict stands and only the hook is tried again.

        Raises :class:`RegistrationError` for what cannot be: a name that is taken, too long, or blank, a function that
        is not async, a class that is no Event.

        Example::

            @outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"}, timeout="10s")
            async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None: ...
        """

        def register(function: F) -> F:
            self._refuse_while_running()
            self._handlers.add(
                make_handler(
                    function,
                    name=name,
                    event_types=event_types,
                    aliases=aliases,
                    topic=topic,
                    where=where_defined(function),
                    **options,
                )
            )
            return function

        return register

    def add_handler(self, handler: EventHandler[Any]) -> None:
        """Register an :class:`EventHandler` object. Raises :class:`RegistrationError` like :meth:`handler`."""
        self._refuse_while_running()
        self._handlers.add(handler_from_object(handler))

    def register(self, *event_types: type[Event]) -> None:
        """Make event classes known that no handler names, so that a topic's payloads decode to them.

        Raises :class:`AmbiguousTypeName` if another class has the same name.
        """
        for cls in event_types:
            self._types.register(cls)

    # --- writing ---------------------------------------------------------------------------------

    def transaction(
        self,
        action_name: str,
        params: Any = None,
        *,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> AbstractAsyncContextManager[Transaction]:
        """``execute`` without an Action class: the block is the action. It commits at its end, and is never retried.

        ``params`` is a mapping or a struct that encodes to a JSON object.

        Example::

            async with outbox.transaction("CloseWallet", {"wallet_id": str(wallet_id)}) as tx:
                await tx.execute("DELETE FROM wallets WHERE id = $1", wallet_id)
                tx.emit(WalletClosed(wallet_id), model_id=wallet_id, model_type="Wallet")
        """
        return self.executor.transaction(
            action_name, params, shard=shard, correlation_id=correlation_id, headers=headers
        )

    async def record(
        self,
        connection: Any,
        *events: Event,
        action: str,
        params: Any = None,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
        shard: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Write outbox rows inside a transaction that the caller has open; the action's id.

        ``connection``: an asyncpg, aiomysql or asyncmy connection, a ``sqlite3`` or ``aiosqlite`` one, or a SQLAlchemy
        ``AsyncSession`` or ``AsyncConnection`` over these. The caller commits. The loops here are woken by
        :meth:`wake`, which you may call after your commit; otherwise they find the events by polling. The other
        parameters are those of ``tx.emit``, for all of these events.

        Raises :class:`NoTransaction` if none is open on the connection, :class:`ConfigurationError` if the connection
        is of another database than the shard.

        Example::

            async with connection.transaction():
                await connection.execute("UPDATE wallets ...")
                await outbox.record(connection, MoneyDeposited(wallet_id, amount), action="Deposit")
            outbox.wake()
        """
        target = self.executor.shard(shard)
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
        session = await self._session_on(target, connection)
        return await self.executor.record(
            target, session, action, params, records, correlation_id=correlation_id, headers=headers
        )

    def wake(self) -> None:
        """Tell the loops, here and in other processes, that events were committed by :meth:`record`."""
        for shard in self._shards.values():
            shard.committed()

    # --- running ---------------------------------------------------------------------------------

    def running(self, *, fanout: bool = True, handling: bool = True) -> AbstractAsyncContextManager[Outbox]:
        """Fan out and run handlers until the block ends.

        Leaving it drains gracefully: nothing new is started, ``envelope.stopping`` is set, running handlers have
        ``shutdown_timeout`` to end before they are cancelled (which uses up no attempt), every outcome is written, and
        the cluster locks are given back. Only then does it return. ``fanout=False`` or ``handling=False`` leave that
        part to other instances; so does the setting ``handling_enabled``.

        It may be left from another task than it was entered in, nested, and entered again. Entering raises
        :class:`DatabaseUnavailable` if no shard can be reached, :class:`SchemaMissing`, :class:`SameDatabase`,
        :class:`PoolTooSmall` or :class:`PooledConnection` for what cannot work; a shard that is only down is probed
        until it comes. Leaving raises :class:`ShutdownError` if outcomes could not be written.

        Example::

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[None]:
                async with outbox.running():
                    yield
        """
        roles = Roles(fanout=fanout, handling=handling and self.settings.handling_enabled)
        return Stay(lambda: self._enter(roles), self._leave)

    async def drain(self, timeout: timedelta | float | str | None = None) -> Drained:
        """Fan out and dispatch until nothing is due; what was done. For tests, cron jobs and scripts.

        Beside this outbox's own ``running()`` it waits until nothing is due, and while another process holds the locks
        it waits for that one. After ``timeout`` (default: never) :class:`DrainTimeout` is raised; handlers that still
        run are cancelled then, which uses up no attempt.

        Example::

            await outbox.executor.execute(OpenWallet("Ada"))
            assert (await outbox.drain()).succeeded == 2
        """
        longest = _FOR_EVER if timeout is None else parse_duration(timeout, key="drain timeout")
        deadline = asyncio.get_running_loop().time() + longest.total_seconds()
        totals: list[tuple[int, ...]] = []
        while True:
            running = self._running
            if running is not None and running.has_begun and not running.is_over:
                totals += await self._drain_shards(deadline)
                if self._running is running:
                    break
            async with self._changing:
                if not self._is_running:
                    totals += await self._drain_shards(deadline)
                    break
        return Drained(*(sum(numbers) for numbers in zip(*totals, strict=True)))

    async def migrate(self) -> dict[str, list[str]]:
        """Bring the tables of every shard up to date; the files that were applied, by shard.

        Safe to call at every start and from several instances at once. Refuses a schema that is newer than this
        outboxio (:class:`SchemaNewer`), and never edits tables that it did not make (:class:`SchemaOccupied`).
        """
        return {name: await shard.database.schema.migrate() for name, shard in self._shards.items()}

    async def check(self) -> None:
        """Make sure that every shard can be reached and has all tables, columns and indexes.

        Raises :class:`DatabaseUnavailable`, :class:`SchemaMissing` (naming what is missing and the file to apply),
        :class:`SchemaNewer`, :class:`SameDatabase`.
        """
        for shard in self._shards.values():
            await shard.database.schema.check()
        await self._refuse_same_database(list(self._shards.values()))

    async def close(self) -> None:
        """Close every connection that this outbox opened. It may be used again afterwards."""
        async with self._changing:
            await self._stop()
            for shard in self._shards.values():
                await shard.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_the_end(self.close())

    # --- inside ----------------------------------------------------------------------------------

    def _shard(self, name: str, source: DatabaseSource, clock: Clock | None) -> ShardRuntime:
        database = open_database(name, source)
        return ShardRuntime(
            self.namespace,
            database,
            ShardClock(clock),
            Emitter(self._types, stores_nul=database.stores_nul, max_hops=self.settings.max_hops),
            self._handlers,
            self.settings,
            owner=self._owner,
            resources=self.resources,
            execute=self._execute,
            join=self._join,
            outbox=self,
            on_dead=self._on_dead,
            redact=self._redact,
        )

    def _inline(self, shard: str) -> InlineShard:
        return self._shards[shard].inline()

    async def _session_on(self, target: WritableShard, connection: Any) -> Session:
        """A caller's own connection, with the transaction that is open on it."""
        session = target.database.wrap(await _unwrap_sqlalchemy(connection))
        if session is None:
            raise ConfigurationError(
                f"record() was given {type(connection).__module__}.{type(connection).__qualname__}, but shard "
                f"{target.database.name!r} is a {target.database.dialect} database; give a connection of its driver"
            )
        if not session.in_transaction():
            raise NoTransaction(connection)
        return session

    async def _execute(self, action: Any, *, shard: str | None = None) -> Any:
        return await self.executor.execute(action, shard=shard)

    async def _join(self, tx: Transaction, action: Any) -> Any:
        return await self.executor.join(tx, action)

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.is_over

    def _refuse_while_running(self) -> None:
        if self._is_running:
            raise RegistrationError("handlers are registered before running() is entered, not while it runs")

    async def _enter(self, roles: Roles) -> Outbox:
        async with self._changing:
            if self._running is not None and self._is_running:
                self._running.join(roles)
                return self
            running = self._running = Running(list(self._shards.values()), roles, self._refuse_same_database)
            try:
                await running.start()
            except BaseException:
                self._running = None
                raise
        return self

    async def _leave(self) -> None:
        async with self._changing:
            if self._running is not None and self._running.part():
                await self._stop()

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.stop()

    async def _drain_shards(self, deadline: float) -> list[tuple[int, ...]]:
        return [await self._drain_shard(shard, deadline) for shard in self._shards.values()]

    async def _drain_shard(self, shard: ShardRuntime, deadline: float) -> tuple[int, ...]:
        work, beside_loops = shard.work, shard.work is not None
        if work is None:
            roles = Roles(fanout=True, handling=self.settings.handling_enabled)
            await shard.prepare(roles)
            work = shard.start_work(roles)
        before = _totals(work.fanout.events, work.counters)
        try:
            await self._drain_until(deadline, work, beside_loops=beside_loops)
        finally:
            if not beside_loops:
                shard.work = None
                await to_the_end(work.end_drain())
        return tuple(b - a for a, b in zip(before, _totals(work.fanout.events, work.counters), strict=True))

    async def _drain_until(self, deadline: float, work: ShardWork, *, beside_loops: bool) -> None:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await work.drain(beside_loops=beside_loops)
        except TimeoutError as error:
            if limit.expired():
                raise DrainTimeout(work.name) from error
            raise

    async def _refuse_same_database(self, shards: list[ShardRuntime]) -> None:
        """Every shard tries one lock that nobody else knows; where it is taken already, two reach one database."""
        if len(shards) < 2:
            return
        probe = LockName(secrets.token_hex(16), "probe")
        locks = [(s, s.database.cluster_lock(self._owner, None, 10.0)) for s in shards]
        try:
            held: list[str] = []
            for shard, lock in locks:
                if not await lock.try_probe(probe):
                    raise SameDatabase(held[-1], shard.name)
                held.append(shard.name)
        finally:
            await to_the_end(_close_all([lock for _, lock in locks]))


async def _close_all(locks: Iterable[ClusterLock]) -> None:
    for lock in locks:
        await lock.close()


def _totals(fanned_out: int, counters: Counters) -> tuple[int, ...]:
    return (fanned_out, counters.succeeded, counters.failed, counters.expired, counters.dead)


async def _unwrap_sqlalchemy(connection: Any) -> Any:
    """The driver's connection inside a SQLAlchemy session or connection; anything else as it is."""
    if type(connection).__module__.startswith("sqlalchemy.") or hasattr(connection, "sync_session"):
        from outboxio.integrations.sqlalchemy import driver_connection

        return await driver_connection(connection)
    return connection
