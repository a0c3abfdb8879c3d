"""Access to databases. ``protocols`` is the interface to the rest of outboxio; each dialect is a subpackage."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, Unpack, cast
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.driver import DEFAULT_LIMITS, Limits
from outboxio.support.text import without_passwords

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    from outboxio.storage.protocols import Database

_EXPECTED = (
    "a URL (postgresql://host/database, mysql://host/database, mariadb://host/database, sqlite:///file.db, sqlite:// "
    "for memory), an AsyncEngine or an async_sessionmaker of SQLAlchemy, an asyncpg.Pool, an aiomysql.Pool, or "
    "Shard(url, ...)"
)

_MYSQL_SCHEMES = ("mysql", "mariadb")
# A URL may name its driver, as in SQLAlchemy.
_SAME_SCHEMES = {
    "postgres": "postgresql",
    "postgresql+asyncpg": "postgresql",
    "postgresql+psycopg": "postgresql",
    "mysql+aiomysql": "mysql",
    "mariadb+aiomysql": "mariadb",
    "mysql+asyncmy": "mysql",  # outboxio itself connects with aiomysql
    "mariadb+asyncmy": "mariadb",
    "sqlite+aiosqlite": "sqlite",
}

# One or several hosts, each with a port: postgresql://first:5432,second:5432/app.
_HOST = r"(?:\[[^\[\]]*\]|[^\[\]:,]*)(?::\d{0,5})?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")


class Shard(Struct, frozen=True):
    """A shard with two sources: ``url`` for actions, ``direct_url`` for the loops, cluster locks and LISTEN.

    Needed if ``url`` leads through a proxy that shares server sessions between transactions, such as PgBouncer in
    transaction mode. ``url`` may also be a SQLAlchemy engine or sessionmaker.

    Example::

        Outbox({"main": Shard("postgresql://pgbouncer:6432/app", direct_url="postgresql://db:5432/app")}, ...)
    """

    url: str | AsyncEngine | async_sessionmaker[Any]
    direct_url: str | None = None

    def __post_init__(self) -> None:
        urls: dict[str, Any] = {"url": self.url, "direct_url": self.direct_url}  # callers may not use type checkers
        for name, url in urls.items():
            if name == "url" and _is_of_sqlalchemy(url):
                continue
            if not isinstance(url, str) and (name, url) != ("direct_url", None):
                raise ConfigurationError(
                    f"Shard({name}=...) is of type {type(url).__name__}; expected a URL string. Pass a pool directly, "
                    "without Shard"
                )

    def __repr__(self) -> str:
        direct = "" if self.direct_url is None else f", direct_url={without_passwords(self.direct_url)!r}"
        url = repr(without_passwords(self.url)) if isinstance(self.url, str) else type(self.url).__name__
        return f"Shard({url}{direct})"


class ConnectionPool(Protocol):
    """A driver's pool: ``asyncpg.Pool`` or ``aiomysql.Pool``."""

    @property
    def acquire(self) -> Callable[..., Any]: ...

    @property
    def release(self) -> Callable[..., Any]: ...


DatabaseSource: TypeAlias = "str | Shard | ConnectionPool | AsyncEngine | async_sessionmaker[Any]"
"""What can be passed as the database of a shard."""


class Access(TypedDict, total=False):
    """Options for the connections of a database."""

    guard: EventLoopGuard
    """The guard of the event loop that may use the connections; by default one for each database."""
    limits: Limits
    """The time limits of the database."""


def open_database(name: str, source: DatabaseSource, **access: Unpack[Access]) -> Database:
    """Create the database of a shard, without I/O. Raises :class:`ConfigurationError` for unsupported sources."""
    url, direct_url = (source.url, source.direct_url) if isinstance(source, Shard) else (source, None)
    if isinstance(url, str):
        return _from_url(name, url, direct_url, access)
    if _is_of_sqlalchemy(url):
        return _from_engine(name, url, direct_url, access)
    driver = type(source).__module__.partition(".")[0]
    if driver == "asyncpg":
        from outboxio.storage.postgres.database import PostgresDatabase

        return PostgresDatabase(name, cast(Any, source), **access)
    if driver == "aiomysql":
        from outboxio.storage.mysql.database import MysqlDatabase

        return MysqlDatabase(name, cast(Any, source), **access)
    if driver == "psycopg_pool":
        raise ConfigurationError(
            f"shard {name!r} is a psycopg pool; pass its conninfo as a URL (postgresql+psycopg://host/database), or "
            "SQLAlchemy's create_async_engine(url)"
        )
    raise ConfigurationError(f"shard {name!r} is {type(source).__name__}; expected {_EXPECTED}")


def _is_of_sqlalchemy(source: object) -> bool:
    return any(cls.__module__.startswith("sqlalchemy.") for cls in type(source).__mro__)


def _from_engine(name: str, source: object, direct_url: str | None, access: Access) -> Database:
    from outboxio.storage.engines.user_engine import user_engine

    access = {"guard": EventLoopGuard.of_shard(name), "limits": DEFAULT_LIMITS, **access}
    engine = user_engine(name, source, access["guard"], access["limits"])
    if direct_url is not None:
        direct_url = _plain(name, direct_url)
    match engine.dialect, engine.driver:
        case "postgresql", ("asyncpg" | "psycopg") as driver:
            from outboxio.storage.postgres.database import PostgresDatabase

            return PostgresDatabase(name, engine, direct_url, driver=driver, **access)
        case (("mysql" | "mariadb"), ("aiomysql" | "asyncmy")):
            with _driver_of(name, "mysql"):
                from outboxio.storage.mysql.database import MysqlDatabase

            return MysqlDatabase(name, engine, direct_url, **access)
        case "sqlite", "aiosqlite":
            from outboxio.storage.sqlite.database import SqliteDatabase

            if (file := engine.file) is None:
                raise ConfigurationError(
                    f"shard {name!r} is an engine for an in-memory SQLite database, which the loops cannot share; pass "
                    "an engine for a file (sqlite+aiosqlite:///file.db), or the URL sqlite:// instead of an engine"
                )
            return SqliteDatabase(name, file, engine, **access)
        case _:
            pass
    raise ConfigurationError(
        f"shard {name!r} is an engine of {engine.dialect}+{engine.driver}; outboxio works with engines of "
        "postgresql+asyncpg, postgresql+psycopg, mysql+aiomysql, mysql+asyncmy, mariadb+aiomysql, mariadb+asyncmy and "
        "sqlite+aiosqlite"
    )


def _plain(name: str, url: str) -> str:
    """Return the URL without the driver in its scheme."""
    return f"{_scheme(name, url)}:{url.partition(':')[2]}"


def _from_url(name: str, url: str, direct_url: str | None, access: Access) -> Database:
    scheme = _scheme(name, url)
    if direct_url is not None and _scheme(name, direct_url) != scheme:
        raise ConfigurationError(f"shard {name!r}: the scheme of direct_url differs from {scheme!r}, the scheme of url")
    driver = _postgres_driver(url)
    url = _plain(name, url)
    if direct_url is not None:
        direct_url = _plain(name, direct_url)
    if scheme == "postgresql":
        with _driver_of(name, "psycopg" if driver == "psycopg" else "postgres"):
            from outboxio.storage.postgres.database import PostgresDatabase

            return PostgresDatabase(name, url, direct_url, driver=driver, **access)
    if scheme in _MYSQL_SCHEMES:
        with _driver_of(name, "mysql"):
            from outboxio.storage.mysql.database import MysqlDatabase

            return MysqlDatabase(name, url, direct_url, **access)
    if scheme == "sqlite":
        from outboxio.storage.sqlite.database import SqliteDatabase

        return SqliteDatabase(name, _sqlite_path(name, url), **access)
    raise ConfigurationError(f"shard {name!r} has a URL with the scheme {scheme!r}; expected {_EXPECTED}")


def _postgres_driver(url: str) -> str:
    """Return the driver in the scheme; by default asyncpg, or psycopg if only psycopg is installed."""
    named = url.partition(":")[0].partition("+")[2]
    if not named and find_spec("asyncpg") is None and find_spec("psycopg") is not None:
        return "psycopg"
    return named or "asyncpg"


@contextmanager
def _driver_of(name: str, extra: str) -> Generator[None]:
    """Import a driver. Raises :class:`ConfigurationError` with the command that installs a missing driver."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"shard {name!r} needs the driver {error.name}: pip install 'outboxio[{extra}]'"
        ) from error


def _scheme(name: str, url: str) -> str:
    """Return the scheme of a URL. Errors do not show a malformed URL, because it is unknown where its password ends."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or not _HOSTS.fullmatch(parts.netloc.rpartition("@")[2]) or _has_late_userinfo(parts):
        raise ConfigurationError(
            f"shard {name!r} has a malformed URL; expected scheme://user:password@host:port/database, with special "
            "characters of user and password written as %XX"
        )
    return _SAME_SCHEMES.get(parts.scheme, parts.scheme)


def _has_late_userinfo(parts: SplitResult) -> bool:
    """Return True if a ``/``, ``?`` or ``#`` in the password has ended the host, so that the path has the password."""
    if parts.scheme == "sqlite" and not parts.netloc:
        return False
    return "@" in parts.path or "@" in parts.fragment or ("@" in parts.query and "@" not in parts.netloc)


def _sqlite_path(name: str, url: str) -> str | None:
    """Parse ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; ``None`` for memory: ``sqlite://``."""
    path = url.removeprefix("sqlite:").removeprefix("//")
    if path in ("", "/", "/:memory:"):
        return None
    if not path.startswith("/"):
        host = path.rpartition("@")[2]
        raise ConfigurationError(f"shard {name!r}: 'sqlite://{host}' names a host; for a file write sqlite:///{host}")
    return path[1:]
