"""The composition root: makes every part of an outbox, and is the object that an application holds."""

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
from outboxio.support.aio import to_the_end
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
    """Commits an application's own rows together with the events that the rows cause, and runs the handlers afterwards.

    ``database``: a URL (``postgresql://``, ``mysql://``, ``mariadb://``, ``sqlite:///file.db``, ``sqlite://`` in
    memory), a pool of asyncpg or aiomysql, or a mapping of shard names to either; the first is the default
    shard. Nothing is opened yet, and a pool that the application has opened is never closed. ``namespace`` names this
    service: two services in the same database never share events. ``settings`` defaults to ``Settings.load()``, the
    variables ``OUTBOXIO_...`` of the environment. ``clock`` is a callable that returns the present
    moment, for tests; the default is the database's clock. ``resources`` is any object that actions and
    handlers should have at hand, as ``tx.resources`` and ``envelope.resources``. If ``resources`` is a mapping from
    types to values or factories, handlers may take the resources as parameters of these types. ``around`` is a function
    of the envelope that returns an async context manager, which surrounds every run of a handler. ``on_dead`` is an
    async function of (envelope, error), called for every notification that ends DEAD, or EXPIRED after a failure (see
    :meth:`handler`).

    ``redact`` is a function of a text that returns the part that an operator may see, without card numbers, tokens and
    names. The function gets type, message and traceback of each error before the error is stored, the description of a
    failure in a log line, and the payloads, parameters, headers and errors that ``outbox.admin`` and the command line
    show, as JSON text. It is called only after a failure and for an operator. If the function fails, the text is left
    out. Handlers get unchanged events.

    ``telemetry`` is told of actions, events and runs: ``outboxio.integrations.opentelemetry.OpenTelemetry()``, an
    object of a subclass of :class:`outboxio.telemetry.Telemetry`, or a list of several.

    An outbox is used in one event loop at a time. A call in another event loop raises :class:`WrongEventLoop`,
    until the first event loop or the outbox is closed. A forked child process may use an outbox that its parent has
    not open; otherwise each use raises :class:`WrongProcess`.

    Raises :class:`ConfigurationError` for a database or an option that cannot be understood, and
    :class:`SettingsError` for an unknown or invalid setting in the environment.

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
        for name, given in names.items():
            opened = open_database(name, given, guard=self._guard, limits=_limits(self.settings))
            emitter = _emitter(opened, environment, self._types)
            self._shards[name] = ShardRuntime(
                environment, opened, ShardClock(clock, name), emitter, is_first=not self._shards
            )
        self.statistics: Mapping[str, ShardStatistics] = {name: s.statistics for name, s in self._shards.items()}
        """What this process did, by shard: ``outbox.statistics["default"].handlers["receipt"].succeeded``."""
        locks = {name: self._shard_locks(shard) for name, shard in self._shards.items()}
        sessions = [each.sessions for each in locks.values()]
        self._lifecycle = Lifecycle(self, self._shards, sessions, self._guard, self._finding_hooks)
        own_connections = OwnConnections(self._guard)
        self.executor = self._action_executor(redact)
        """Runs actions."""
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
        """``execute`` without an Action class: the block is the action. Its end commits, and it is never retried.

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
        """A connection for reading, in a read-only transaction that ends with the block. No row is written.

        ``shard`` names a shard that is not the first. Raises :class:`NestedConnection` where a transaction of this
        outbox is open on that shard: read through ``tx`` there. Raises :class:`DatabaseUnavailable` if the shard cannot
        be reached. The database refuses a statement that writes, with the driver's error.

        Example::

            async with outbox.connection() as connection:
                rows = await connection.fetch("SELECT id, balance FROM wallets WHERE balance < 0")
        """
        return connected(self.executor.shard(shard), self)

    @cached_property
    def inbox(self) -> Inbox:
        """Receives messages of brokers and webhooks: ``await outbox.inbox.receive(...)``."""
        from outboxio.inbox.inbox import Inbox

        return Inbox(self.namespace, self.executor, self._own_connections.session_on, self._inline)

    # --- running ---------------------------------------------------------------------------------

    def running(self, *, fanout: bool = True, handling: bool = True) -> AbstractAsyncContextManager[Outbox]:
        """Fan out and run handlers until the block ends.

        The end of the block winds down gracefully: no further run starts, ``envelope.stopping`` is set, running
        handlers have ``shutdown_timeout`` to end before they are cancelled (which uses up no attempt), every outcome is
        written, and the cluster locks are given back. ``fanout=False`` or ``handling=False`` leave that part to
        other instances; so does the setting ``handling_enabled``.

        The block may be left by a different task than the entering task, nested, and entered again. A block inside a
        handler of this outbox does not prolong the run. The last block cannot be left inside a handler or a
        transaction, because the block would wait for itself: :class:`WaitsForItself`. Entering raises
        :class:`DatabaseUnavailable` if no shard can be reached, and :class:`SchemaMissing`, :class:`SameDatabase`,
        :class:`PoolTooSmall` or :class:`PooledConnection` for a configuration that cannot work; a shard that is only
        down is probed until it comes. Leaving raises :class:`ShutdownError` if outcomes could not be written.

        Example::

            async with outbox.running():
                await stop.wait()
        """
        for part, given in {"fanout": fanout, "handling": handling}.items():
            if not isinstance(given, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
                raise ConfigurationError(f"running({part}={briefly(given)}): expected True or False")
        roles = Roles(fanout=fanout, handling=handling and self.settings.handling_enabled)
        return RunHandle(lambda: self._enter(roles))

    async def drain(self, timeout: timedelta | float | str | None = None) -> Drained:
        """Fan out and dispatch until no notification is due. Returns the work of this call. For tests, cron, scripts.

        Beside this outbox's own ``running()`` the call waits until no notification is due. While another process holds
        the locks, the call waits for that process. After ``timeout`` (default: never) the call raises
        :class:`DrainTimeout`; handlers that still run are cancelled then, which uses up no attempt. Inside a handler or
        a transaction of this outbox the call would wait for itself, and raises :class:`WaitsForItself`. Raises
        :class:`DatabaseUnavailable` if a shard cannot be reached, is locked, or closes the connection.

        Example::

            await outbox.executor.execute(OpenWallet("Ada"))
            assert (await outbox.drain()).succeeded == 2
        """
        return await self._lifecycle.drain(timeout)

    async def migrate(self, *, contract: bool = False) -> dict[str, list[str]]:
        """Bring the tables of every shard up to date. Returns by shard the files that were applied, and indexes made.

        A change on which an older version of outboxio cannot run is made in two steps. ``migrate()`` adds the new part
        (expand), and processes of both versions work side by side. ``migrate(contract=True)`` drops the old part: call
        it once no process of the older version runs any more. While an older version has announced handlers within 2
        minutes, in any namespace of the database, the call applies nothing and raises :class:`SchemaInUse`. A database
        without tables gets both steps at once.

        Safe to call at every start and from several instances at the same time. A missing index is made again, which on
        PostgreSQL keeps producers waiting meanwhile. A missing table or column that held data is not made again:
        :class:`SchemaMissing` has the statements. Refuses a schema that is newer than this outboxio
        (:class:`SchemaNewer`), never edits tables that it did not make (:class:`SchemaOccupied`), and names a right
        that is missing (:class:`RightsMissing`).
        Inside a transaction of this outbox the call would wait for itself, and raises :class:`WaitsForItself`.

        Example::

            await outbox.migrate()  # at every deployment
            await outbox.migrate(contract=True)  # after all processes of the older version have ended
        """
        refuse_in_transaction(self, "outbox.migrate()", "migrate before the transaction, at the start of the program")
        return {name: await shard.database.schema.migrate(contract=contract) for name, shard in self._shards.items()}

    async def adopt(self, *, dry_run: bool = False) -> dict[str, list[str]]:
        """Take over the tables of Ekbatan in every shard, then migrate. Returns by shard the statements for the tables.

        Each handler goes on where it was: rows keep their states, attempts and moments. Stop the jobs of Ekbatan
        before; its writers may work on, and wait while the tables change. With ``dry_run=True`` nothing changes. A
        second call does nothing more, and goes on with an adoption that was interrupted. On PostgreSQL each shard
        changes in a single transaction.

        Raises :class:`SchemaNotAdoptable` for tables that are not Ekbatan's, with every difference, before anything is
        written; :class:`RightsMissing`; :class:`SchemaNewer`; :class:`WaitsForItself` inside a transaction of this
        outbox.

        Example::

            for shard, statements in (await outbox.adopt(dry_run=True)).items():
                print(shard, *statements, sep="\\n")
            await outbox.adopt()
        """
        refuse_in_transaction(self, "outbox.adopt()", "adopt before the transaction, in a program of its own")
        return {name: await shard.database.schema.adopt(dry_run=dry_run) for name, shard in self._shards.items()}

    async def check(self) -> None:
        """Make sure that every shard can be reached and has all tables, columns and indexes.

        Raises :class:`DatabaseUnavailable`, :class:`SchemaMissing` (with the missing part, and the remedy),
        :class:`RightsMissing`, :class:`SchemaNewer`, :class:`SameDatabase`.
        """
        for shard in self._shards.values():
            with as_unavailable(shard.database):
                await shard.database.schema.check()
        await refuse_same_database(list(self._shards.values()))

    @cached_property
    def admin(self) -> Admin:
        """The questions and operations of an operator."""
        from outboxio.operations.admin import Admin
        from outboxio.operations.base import AdminSetup
        from outboxio.operations.recorder import By, Ends

        shards = list(self._shards.values())
        return Admin(AdminSetup(
            namespace=self.namespace, shards={shard.name: shard.for_operators for shard in shards},
            settings=self.settings, handlers=self._handlers, types=self._types, redact=self._redact, owner=self,
            process=shards[0].environment.process, ends=Ends(), overviews=self._health.overviews,
        ), By())  # fmt: skip

    async def health(self) -> Health:
        """The health of this process and of the tables: alive, ready, in order, and the reasons if not.

        Reads the memory of the process, and asks the database at most once in 5 s, for at most 1 s. Never raises for a
        database that is down. Works inside and outside of ``running()``, and in any event loop: for a second event
        loop, the event loop of the outbox answers, and if that event loop is blocked, the result is not live.

        Example::

            health = await outbox.health()
            print(health.status, *health.reasons)
        """
        return await self._health.read()

    async def close(self) -> None:
        """Close every connection that this outbox opened. The outbox may be used again, then also in a new event loop.

        Ends ``running()`` as well. Inside a handler or a transaction of this outbox the call would wait for itself,
        and raises :class:`WaitsForItself`.
        """
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_the_end(self.close())

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
        self._guard.enter()  # before the runner is made: an event loop that takes over forgets all earlier runners
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
        raise ConfigurationError(f"clock is {briefly(clock)}; expected a callable that returns the present moment")
    return cast("Clock | None", clock)
