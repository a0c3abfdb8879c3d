"""The composition root: creates the parts of an outbox, and is the object that applications use."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from outboxio.actions.executor import ActionExecutor, refuse_in_transaction
from outboxio.actions.reading import Connection, connected
from outboxio.catalogue.publishing import Publishing
from outboxio.errors import ConfigurationError
from outboxio.handlers.finding_hooks import FindingHooks
from outboxio.handlers.options import DeadHook, checked_hook
from outboxio.handlers.registration import Around, Registration, Wiring
from outboxio.jobs.job import JobRegistration
from outboxio.locks.keyed_lock import Locking, ShardLocks
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.emitter import Emitter
from outboxio.model.event import EventTypes, checked_name
from outboxio.model.redaction import Redact, checked_redact
from outboxio.runtime.bootstrapping import Bootstrapping
from outboxio.runtime.environment import Drained, Environment, OwnConnections, Roles
from outboxio.runtime.lifecycle import Lifecycle, Lifespan
from outboxio.runtime.recording import Recording
from outboxio.runtime.running import Leave, RunHandle, refuse_same_database
from outboxio.runtime.shard import ShardRuntime
from outboxio.settings import Settings
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage import DatabaseSource, open_database
from outboxio.storage.connections.driver import Limits
from outboxio.storage.protocols import Database
from outboxio.storage.unavailable import as_unavailable
from outboxio.support.aio import run_to_completion
from outboxio.support.clock import Clock, ShardClock
from outboxio.support.ids import ProcessName
from outboxio.support.log import log_of
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import AnyTelemetry, TelemetryChoice
from outboxio.transaction import Transaction

if TYPE_CHECKING:
    from outboxio.health.reader import HealthReader
    from outboxio.health.values import Health
    from outboxio.inbox.inbox import Inbox
    from outboxio.inbox.inline import InlineRunner
    from outboxio.jobs.runner import JobSetup
    from outboxio.operations.admin import Admin

__all__ = ["Drained", "Outbox"]

logger = log_of(__name__)


class Outbox(Registration, JobRegistration, FindingHooks, Recording, Bootstrapping, Locking, Publishing):
    """Commits your application's rows together with the events they cause, and runs the handlers afterwards.

    ``database``: a URL (``postgresql://``, ``mysql://``, ``mariadb://``, ``sqlite:///file.db``, ``sqlite://`` in
    memory), a pool of asyncpg or aiomysql, or a mapping of shard names to either; the first is the default shard. The
    constructor does no I/O, and a user-supplied pool is never closed. ``namespace`` identifies this service: two
    services in the same database never share events. ``settings`` defaults to ``Settings.load()``, which reads the
    environment variables ``OUTBOXIO_...``. ``clock`` is a callable that returns the current time, for tests; the
    default is the database's clock. ``resources`` is any object that actions and handlers need, available as
    ``tx.resources`` and ``envelope.resources``. If it is a mapping from types to values or factories, handlers may
    take resources as parameters of these types. ``around`` is a function of the envelope that returns an async context
    manager; it is entered around every run of a handler. ``on_dead`` is an async function of (envelope, error), called
    for every notification that ends DEAD, or EXPIRED after a failure (see :meth:`handler`).

    ``redact`` is a function that takes a text and returns what an operator may see of it, without card numbers, tokens
    and names. It is called with the type, message and traceback of each error before the error is stored, with failure
    descriptions before they are logged, and with the payloads, parameters, headers and errors that ``outbox.admin``
    and the command line show, as JSON text. It runs only after failures and for operators. If it raises, the text is
    omitted. Handlers always receive unredacted events.

    ``telemetry`` observes actions, events and runs: ``outboxio.integrations.opentelemetry.OpenTelemetry()``, an
    instance of a subclass of :class:`outboxio.telemetry.Telemetry`, or a list of several.

    An outbox can be used in one event loop at a time. A call in another event loop raises :class:`WrongEventLoop`
    until the first event loop or the outbox is closed. A forked child process may use an outbox only if its parent has
    not opened it; otherwise every use raises :class:`WrongProcess`.

    Raises :class:`ConfigurationError` for an invalid database or option, and :class:`SettingsError` for an unknown or
    invalid setting in the environment.

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
        around: Around | None = None,
        on_dead: DeadHook | None = None,
        redact: Redact | None = None,
        telemetry: AnyTelemetry | None = None,
    ) -> None:
        Registration.__init__(self, Wiring(resources, around))
        JobRegistration.__init__(self, resources)
        FindingHooks.__init__(self)
        hook, redact = checked_hook(on_dead, "on_dead of the outbox"), checked_redact(redact)
        self.namespace = checked_name(namespace, "namespace")
        self.settings = _checked_settings(settings)
        self.resources, self._telemetry = resources, TelemetryChoice(telemetry)
        self._guard = EventLoopGuard(f"the outbox of namespace {self.namespace!r}")
        sources = database if isinstance(database, Mapping) else {"default": database}
        if not sources:
            raise ConfigurationError("database is an empty mapping; give at least one shard")
        environment, clock = self._environment(hook, redact), _checked_clock(clock)
        names = {checked_name(name, "shard name"): source for name, source in sources.items()}
        self._shards: dict[str, ShardRuntime] = {}
        for name, source in names.items():
            opened = open_database(name, source, guard=self._guard, limits=_limits(self.settings))
            emitter = _emitter(opened, environment, self._types)
            self._shards[name] = ShardRuntime(
                environment, opened, ShardClock(clock, name), emitter, is_first=not self._shards
            )
        self.statistics: Mapping[str, ShardStatistics] = {name: s.statistics for name, s in self._shards.items()}
        """Counters of this process, by shard: ``outbox.statistics["default"].handlers["receipt"].succeeded``."""
        locks = {name: self._shard_locks(shard) for name, shard in self._shards.items()}
        sessions = [each.sessions for each in locks.values()]
        self._lifecycle = Lifecycle(self, self._shards, sessions, self._guard, self._finding_hooks)
        own_connections = OwnConnections(self._guard)
        self.executor = self._action_executor(redact)
        """The executor, which runs actions."""
        self.execute = self.executor.execute
        """Runs an action: ``balance = await outbox.execute(DepositMoney(wallet_id, amount))``."""
        self.lifespan = Lifespan(self, self._guard)
        """``running()`` for a web application: ``FastAPI(lifespan=outbox.lifespan)``."""
        Recording.__init__(self, self.executor, own_connections, list(self._shards.values()), self._guard)
        Locking.__init__(self, locks)
        self._own_connections, self._redact = own_connections, redact
        self._telemetry.chosen.attached(self)

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
        """Run the block as an action, without an Action class. It commits at the end, and is never retried.

        ``params`` is a mapping or a struct that encodes to a JSON object.

        Example::

            async with outbox.transaction("CloseWallet", {"wallet_id": str(wallet_id)}) as tx:
                await tx.execute("DELETE FROM wallets WHERE id = $1", wallet_id)
                tx.emit(WalletClosed(wallet_id), model_id=wallet_id, model_type="Wallet")
        """
        return self.executor.transaction(
            action_name, params, shard=shard, correlation_id=correlation_id, headers=headers
        )

    def connection(self, *, shard: str | None = None) -> AbstractAsyncContextManager[Connection]:
        """Open a connection for reading, in a read-only transaction that ends with the block. No event is written.

        ``shard`` defaults to the first shard. Raises :class:`NestedConnection` inside a transaction of this outbox on
        that shard: read through ``tx`` there. Raises :class:`DatabaseUnavailable` if the shard cannot be reached. A
        statement that writes fails with the driver's error.

        Example::

            async with outbox.connection() as connection:
                rows = await connection.fetch("SELECT id, balance FROM wallets WHERE balance < 0")
        """
        return connected(self.executor.shard(shard), self)

    @cached_property
    def inbox(self) -> Inbox:
        """The inbox, which receives messages from brokers and webhooks: ``await outbox.inbox.receive(...)``."""
        from outboxio.inbox.inbox import Inbox

        return Inbox(self.namespace, self.executor, self._own_connections.session_on, self._inline)

    # --- running ---------------------------------------------------------------------------------

    def running(self, *, fanout: bool = True, handling: bool = True) -> AbstractAsyncContextManager[Outbox]:
        """Fan out and run handlers until the block ends.

        Leaving the block shuts down gracefully: no new run starts, ``envelope.stopping`` is set, running handlers get
        ``shutdown_timeout`` to finish before they are cancelled (which does not count as an attempt), every outcome is
        written, and the cluster locks are released. ``fanout=False`` or ``handling=False`` leaves that part to other
        processes, and so does the setting ``handling_enabled=False``.

        The block may be left from another task than it was entered in, it may be nested, and entered again. A block
        inside a handler of this outbox does not prolong the run. Leaving the last block inside a handler or a
        transaction would deadlock, and raises :class:`SelfDeadlock`. Entering raises :class:`DatabaseUnavailable` if no
        shard can be reached, and :class:`SchemaMissing`, :class:`SameDatabase`, :class:`PoolTooSmall` or
        :class:`PooledConnection` for a configuration that cannot work; if only some shards are down, they are probed
        until they come up. Leaving raises :class:`ShutdownError` if outcomes could not be written.

        Example::

            async with outbox.running():
                await stop.wait()
        """
        for part, value in {"fanout": fanout, "handling": handling}.items():
            if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
                raise ConfigurationError(f"running({part}={briefly(value)}): expected True or False")
        roles = Roles(fanout=fanout, handling=handling and self.settings.handling_enabled)
        return RunHandle(lambda: self._enter(roles))

    async def drain(self, timeout: timedelta | float | str | None = None) -> Drained:
        """Fan out and dispatch until no notification is due, for tests, cron jobs and scripts. Returns the counts.

        While this outbox is in ``running()``, the call only waits until no notification is due. While another process
        holds the locks, it waits for that process. After ``timeout`` (default: no limit) it raises
        :class:`DrainTimeout`, and cancels handlers that are still running, which does not count as an attempt. Raises
        :class:`SelfDeadlock` inside a handler or a transaction of this outbox, and :class:`DatabaseUnavailable` if a
        shard cannot be reached, is locked, or closes the connection.

        Example::

            await outbox.executor.execute(OpenWallet("Ada"))
            assert (await outbox.drain()).succeeded == 2
        """
        return await self._lifecycle.drain(timeout)

    async def migrate(self, *, contract: bool = False) -> dict[str, list[str]]:
        """Bring the tables of every shard up to date. Returns the applied files and created indexes, by shard.

        A change that older versions of outboxio cannot work with is made in two steps. ``migrate()`` adds the new part
        (expand), and processes of both versions run side by side. ``migrate(contract=True)`` drops the old part: call
        it when no process of the older version is running. If an older version announced handlers within the last 2
        minutes, in any namespace of the database, the call applies nothing and raises :class:`SchemaInUse`. A database
        without tables gets both steps at once.

        Safe to call at every start, and from several processes at the same time. A missing index is created again,
        which on PostgreSQL blocks producers until it is built. A missing table or column that held data is not created
        again: :class:`SchemaMissing` has the statements. Raises :class:`SchemaNewer` for a schema that is newer than
        this version, :class:`SchemaOccupied` for tables that outboxio did not create, :class:`RightsMissing` for
        missing privileges, and :class:`SelfDeadlock` inside a transaction of this outbox.

        Example::

            await outbox.migrate()  # at every deployment
            await outbox.migrate(contract=True)  # after all processes of the older version have stopped
        """
        refuse_in_transaction(self, "outbox.migrate()", "migrate at program start, before the transaction")
        return {name: await shard.database.schema.migrate(contract=contract) for name, shard in self._shards.items()}

    async def adopt(self, *, dry_run: bool = False) -> dict[str, list[str]]:
        """Adopt the tables of Ekbatan in every shard, then migrate. Returns the executed statements, by shard.

        Handlers continue where they were: rows keep their states, attempts and times. Stop the jobs of Ekbatan first;
        its writers may continue, and are blocked while the tables change. With ``dry_run=True`` nothing changes. The
        call is idempotent, and completes an adoption that was interrupted. On PostgreSQL each shard changes in a
        single transaction.

        Raises :class:`SchemaNotAdoptable`, with all differences, for tables that are not Ekbatan's, before anything is
        written; :class:`RightsMissing`; :class:`SchemaNewer`; and :class:`SelfDeadlock` inside a transaction of this
        outbox.

        Example::

            for shard, statements in (await outbox.adopt(dry_run=True)).items():
                print(shard, *statements, sep="\\n")
            await outbox.adopt()
        """
        refuse_in_transaction(self, "outbox.adopt()", "adopt before the transaction, in a separate program")
        return {name: await shard.database.schema.adopt(dry_run=dry_run) for name, shard in self._shards.items()}

    async def check(self) -> None:
        """Check that every shard can be reached and has all tables, columns and indexes.

        Raises :class:`DatabaseUnavailable`, :class:`SchemaMissing` (which names the missing part and the fix),
        :class:`RightsMissing`, :class:`SchemaNewer`, :class:`SameDatabase`.
        """
        for shard in self._shards.values():
            with as_unavailable(shard.database):
                await shard.database.schema.check()
        await refuse_same_database(list(self._shards.values()))

    @cached_property
    def admin(self) -> Admin:
        """Queries and operations for operators."""
        from outboxio.operations.admin import Admin
        from outboxio.operations.base import AdminSetup
        from outboxio.operations.recorder import BulkCutoffs, By

        shards = list(self._shards.values())
        return Admin(AdminSetup(
            namespace=self.namespace, shards={shard.name: shard.for_operators for shard in shards},
            settings=self.settings, handlers=self._handlers, types=self._types, redact=self._redact, owner=self,
            process=shards[0].environment.process, cutoffs=BulkCutoffs(), overviews=self._health.overviews,
        ), By())  # fmt: skip

    async def health(self) -> Health:
        """Return the health of this process and its shards: live, ready, healthy, and the reasons if not.

        Reads in-memory state, and queries the database at most once every 5 s, for at most 1 s. Does not raise if the
        database is down. Works inside and outside of ``running()``, and in any event loop: a call from another event
        loop is answered by the event loop of the outbox, and if that one is blocked, the result is not live.

        Example::

            health = await outbox.health()
            print(health.status, *health.reasons)
        """
        return await self._health.read()

    async def close(self) -> None:
        """Close every connection that this outbox opened. It may be used again, also in a new event loop.

        Ends ``running()`` as well. Raises :class:`SelfDeadlock` inside a handler or a transaction of this outbox.
        """
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_completion(self.close())

    # --- inside ----------------------------------------------------------------------------------

    def _environment(self, on_dead: DeadHook | None, redact: Redact) -> Environment:
        return Environment(
            namespace=self.namespace,
            handlers=self._handlers,
            jobs=self._jobs,
            settings=self.settings,
            process=ProcessName(),
            outbox=self,
            execute=self._execute,
            join=self._join,
            resources=self.resources,
            redact=redact,
            telemetry=self._telemetry,
            on_dead=on_dead,
        )

    def _setup_of_jobs(self) -> JobSetup:
        return next(iter(self._shards.values())).for_jobs()

    def _action_executor(self, redact: Redact) -> ActionExecutor:
        return ActionExecutor(
            self.namespace,
            self._shards,
            resources=self.resources,
            record_empty_actions=self.settings.record_empty_actions,
            owner=self,
            redact=redact,
            telemetry=self._telemetry,
        )

    @cached_property
    def _health(self) -> HealthReader:
        from outboxio.health.reader import HealthReader

        return HealthReader(self.namespace, self._lifecycle, self._shards, self._guard)

    def _shard_locks(self, shard: ShardRuntime) -> ShardLocks:
        statistics = shard.statistics.keyed_locks
        return ShardLocks(self, shard.environment, shard.database, self.settings, self._guard, statistics)

    async def _enter(self, roles: Roles) -> tuple[Outbox, Leave]:
        return self, await self._lifecycle.enter(roles)

    def _inline(self, shard: str) -> InlineRunner:
        self._guard.enter()  # before the runner is created: entering a new event loop discards all earlier runners
        return self._shards[shard].inline()

    def _refuse_while_running(self) -> None:
        self._lifecycle.refuse_while_running()

    async def _execute(self, action: Any, *, shard: str | None = None) -> Any:
        return await self.executor.execute(action, shard=shard)

    async def _join(self, tx: Transaction, action: Any) -> Any:
        return await self.executor.join(tx, action)


def _limits(settings: Settings) -> Limits:
    return Limits(**{limit: getattr(settings, limit).total_seconds() for limit in Limits.__struct_fields__})


def _emitter(database: Database, environment: Environment, types: EventTypes) -> Emitter:
    return Emitter(
        types,
        stores_nul=database.stores_nul,
        check_numbers=database.check_numbers,
        max_hops=environment.settings.max_hops,
        validates=environment.settings.validate_events,
        telemetry=environment.telemetry,
    )


def _checked_settings(settings: Any) -> Settings:
    if settings is None:
        return Settings.load()
    if not isinstance(settings, Settings):
        raise ConfigurationError(f"settings is {briefly(settings)}; expected Settings(...), or Settings.load(...)")
    return settings


def _checked_clock(clock: Any) -> Clock | None:
    if clock is not None and not callable(clock):
        raise ConfigurationError(f"clock is {briefly(clock)}; expected a callable that returns the current time")
    return cast("Clock | None", clock)
