"""A user-supplied SQLAlchemy ``AsyncEngine``. outboxio never disposes of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outboxio.errors import ConfigurationError, DatabaseUnavailable, PoolExhausted
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.driver import Limits
from outboxio.storage.connections.pool import GiveBack, Occupancy
from outboxio.support.aio import propagate_cancellation

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker

    from outboxio.storage.engines.unit import Unit

UNLIMITED = 0


class UserEngine:
    """Opens the connections of a shard through an engine, so that the options and events of the engine apply.

    - Actions check connections out of the engine's pool.
    - Loops and locks open separate connections, and take none out of the pool.
    """

    def __init__(
        self,
        shard: str,
        engine: AsyncEngine,
        maker: async_sessionmaker[AsyncSession],
        guard: EventLoopGuard,
        limits: Limits,
    ) -> None:
        self.shard = shard
        self._engine = engine
        self._maker = maker
        self._guard = guard
        self._limits = limits
        self.dialect = engine.dialect.name
        """The name of SQLAlchemy's dialect."""
        self.driver = engine.dialect.driver

    @property
    def address(self) -> str:
        """The address for errors and logs, without user and password."""
        url = self._engine.url
        named = getattr(self._engine.pool, "_orig_logging_name", None)
        port = f":{url.port}" if url.port else ""
        pool = f"the pool {named!r} of the engine" if named else "the pool of the engine"
        return f"{pool} {url.drivername}://{url.host or ''}{port}/{url.database or ''}"

    @property
    def file(self) -> str | None:
        """The file of a SQLite engine; ``None`` for a database in memory."""
        url = self._engine.url
        path = url.database or ""
        if "uri" in url.query:
            path = path.removeprefix("file:").partition("?")[0]
        if not path or ":memory:" in path or url.query.get("mode") == "memory":
            return None
        return path

    @property
    def size(self) -> int:
        """The maximum number of connections of the pool; 0 without a limit."""
        pool: Any = self._engine.pool
        if not hasattr(pool, "checkedout"):
            return UNLIMITED
        overflow: int = pool._max_overflow
        return UNLIMITED if overflow < 0 else int(pool.size()) + overflow

    @property
    def in_use(self) -> int:
        """How many connections of the pool are in use, including your application's; 0 if it does not report this."""
        return self._occupancy().in_use

    def before_invalidation(self, listener: Callable[[Any, Any, BaseException | None], None]) -> None:
        """Call ``listener`` before the pool closes a connection after an error: SQLAlchemy's PoolEvents.invalidate."""
        from sqlalchemy import event

        if not event.contains(self._engine.sync_engine, "invalidate", listener):  # another outbox may use the engine
            event.listen(self._engine.sync_engine, "invalidate", listener)

    async def check_out(self) -> tuple[Unit, GiveBack]:
        """Check a connection out of the engine's pool for a single transaction; return it and its release function.

        Raises :class:`PoolExhausted` if no connection is released within the timeout of the engine's pool or the
        setting ``pool_timeout``, and :class:`DatabaseUnavailable` if the engine cannot connect.
        """
        from outboxio.storage.engines.unit import Unit

        self._guard.enter()
        connection = self._engine.connect()
        with self._reaching():
            async with asyncio.timeout(self._limits.pool_timeout):
                await propagate_cancellation(connection.start(), _close)
        return Unit(connection, self._maker), Unit.close

    def connect_options(self, *, listens: bool = False) -> dict[str, Any]:
        """Return the arguments of the driver's ``connect``: the options of the URL and of ``connect_args``.

        ``listens``: listeners to ``do_connect`` may change them, for example for expiring passwords. This needs a
        SQLAlchemy greenlet. Raises :class:`ConfigurationError` if the arguments of the engine are unknown.
        """
        pool, dialect = self._engine.pool, self._engine.sync_engine.dialect
        creator: Any = pool._creator  # pyright: ignore[reportPrivateUsage]  # only its closure has connect_args
        found: Any = inspect.getclosurevars(creator).nonlocals if inspect.isfunction(creator) else {}
        if "cparams" not in found:
            raise self.refusal("creator, async_creator or pool")
        options: dict[str, Any] = dict(found["cparams"])
        for listener in dialect.dispatch.do_connect if listens else ():
            if listener(dialect, None, [], options) is not None:
                raise self.refusal("a listener to do_connect that connects")
        return options

    def refusal(self, option: str) -> ConfigurationError:
        """Return the error for an engine option that the loops cannot use, because they need another driver."""
        return ConfigurationError(
            f"shard {self.shard!r} is an engine over {self.driver} with {option}, which its loops cannot use, because "
            f"they connect with another driver. Give the loops a URL, as in Shard(engine, direct_url='{self.dialect}://...')"
        )

    async def open(self) -> Any:
        """Open a connection of the driver, in any event loop, in the same way as the engine's pool."""
        from sqlalchemy.util import greenlet_spawn

        # A copy of the pool with the same connect options and event listeners: loops must not wait for connections of
        # your application, and the lock thread has a separate event loop.
        pool = self._engine.sync_engine.pool.recreate()
        with self._reaching():
            async with asyncio.timeout(self._limits.connect_timeout):
                connection = await greenlet_spawn(pool.connect)
        opened = connection.driver_connection
        connection.detach()
        return opened

    @contextmanager
    def _reaching(self) -> Generator[None]:
        from sqlalchemy import exc

        try:
            yield
        except (TimeoutError, exc.TimeoutError) as error:
            found = self._occupancy()
            if isinstance(error, TimeoutError) and (not found.size or found.in_use < found.size):
                raise DatabaseUnavailable(self.shard, self.address, "no connection was opened in time") from error
            raise PoolExhausted(
                self.shard, self.address, size=found.size, in_use=found.in_use, held=None,
                timeout=self._limits.pool_timeout,
            ) from error  # fmt: skip
        except self._connect_errors as error:
            reason = error.orig if isinstance(error, exc.DBAPIError) else error
            raise DatabaseUnavailable(self.shard, self.address, str(reason) or type(reason).__name__) from error

    @cached_property
    def _connect_errors(self) -> tuple[type[Exception], ...]:
        """All errors with which opening a connection can fail.

        SQLAlchemy wraps errors of the driver only if the engine itself connects. A pool raises errors of the DBAPI, and
        SQLAlchemy 2.0 does not wrap all errors of asyncpg.
        """
        from sqlalchemy import exc

        dbapi: Any = self._engine.dialect.loaded_dbapi
        asyncpg: Any = getattr(dbapi, "asyncpg", None)
        names = ("PostgresError", "InterfaceError", "InternalClientError")
        own = () if asyncpg is None else tuple(getattr(asyncpg.exceptions, name) for name in names)
        return (exc.DBAPIError, dbapi.Error, OSError, OverflowError, *own)

    def _occupancy(self) -> Occupancy:
        pool: Any = self._engine.pool
        return Occupancy(pool.checkedout() if self.size else 0, self.size)


def user_engine(shard: str, source: Any, guard: EventLoopGuard, limits: Limits) -> UserEngine:
    """Return the engine of a shard. Raises :class:`ConfigurationError` for other SQLAlchemy objects."""
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    maker: async_sessionmaker[AsyncSession]
    if isinstance(source, async_sessionmaker):
        maker, engine = source, source.kw.get("bind")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]  # checked below
    else:
        maker, engine = async_sessionmaker(expire_on_commit=False), source
    if not isinstance(engine, AsyncEngine):
        found = "an async_sessionmaker without a default engine" if engine is None else f"a {type(engine).__qualname__}"
        raise ConfigurationError(
            f"shard {shard!r} is {found}; expected an AsyncEngine from create_async_engine(...), or "
            "async_sessionmaker(engine)"
        )
    return UserEngine(shard, engine, maker, guard, limits)


async def _close(connection: AsyncConnection) -> None:
    await connection.close()
