"""What talks to a database. ``protocols`` is the seam; each dialect is a package of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.passwords import without_passwords

if TYPE_CHECKING:
    from outboxio.storage.protocols import Database

_EXPECTED = (
    "a URL (postgresql://host/database, mysql://host/database, mariadb://host/database, sqlite:///file.db, sqlite:// "
    "for memory), an asyncpg.Pool, aiomysql.Pool or asyncmy.Pool, or Shard(url, ...)"
)

# A URL may name its driver, as SQLAlchemy's do: here is what each is installed with.
_MYSQL_SCHEMES = {"mysql": "mysql", "mariadb": "mysql", "mysql+asyncmy": "asyncmy", "mariadb+asyncmy": "asyncmy"}
_MYSQL_DRIVERS = ("aiomysql", "asyncmy")
_SAME_SCHEMES = {"postgres": "postgresql", "mysql+aiomysql": "mysql", "mariadb+aiomysql": "mariadb"}

# One host or several, each with its port: postgresql://first:5432,second:5432/app.
_HOST = r"(?:\[[^\[\]]*\]|[^\[\]:,]*)(?::\d{0,5})?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")


class Shard(Struct, frozen=True):
    """One shard, reached in two ways: ``url`` for actions, ``direct_url`` for the loops, their locks and LISTEN.

    Needed where ``url`` leads through a proxy that shares server sessions between transactions, such as PgBouncer in
    transaction mode.

    Example::

        Outbox({"main": Shard("postgresql://pgbouncer:6432/app", direct_url="postgresql://db:5432/app")}, ...)
    """

    url: str
    direct_url: str | None = None

    def __repr__(self) -> str:
        direct = "" if self.direct_url is None else f", direct_url={without_passwords(self.direct_url)!r}"
        return f"Shard({without_passwords(self.url)!r}{direct})"


class ConnectionPool(Protocol):
    """A driver's own pool: ``asyncpg.Pool``, ``aiomysql.Pool`` or asyncmy's."""

    @property
    def acquire(self) -> Callable[..., Any]: ...

    @property
    def release(self) -> Callable[..., Any]: ...


DatabaseSource = str | Shard | ConnectionPool
"""How one shard's database may be given."""


def open_database(name: str, source: DatabaseSource) -> Database:
    """The database that a shard was given as; no I/O yet. :class:`ConfigurationError` says what would do."""
    if isinstance(source, Shard):
        return _from_url(name, source.url, source.direct_url)
    if isinstance(source, str):
        return _from_url(name, source, None)
    driver = type(source).__module__.partition(".")[0]
    if driver == "asyncpg":
        from outboxio.storage.postgres.database import PostgresDatabase

        return PostgresDatabase(name, cast(Any, source))
    if driver in _MYSQL_DRIVERS:
        from outboxio.storage.mysql.database import MysqlDatabase

        return MysqlDatabase(name, cast(Any, source))
    raise ConfigurationError(f"shard {name!r} is {type(source).__name__}; expected {_EXPECTED}")


def _from_url(name: str, url: str, direct_url: str | None) -> Database:
    scheme = _scheme(name, url)
    if direct_url is not None and _scheme(name, direct_url) != scheme:
        raise ConfigurationError(f"shard {name!r} has a direct_url of another scheme than {scheme!r}, that of its url")
    if scheme == "postgresql":
        with _driver_of(name, "postgres"):
            from outboxio.storage.postgres.database import PostgresDatabase
        return PostgresDatabase(name, url, direct_url)
    if scheme in _MYSQL_SCHEMES:
        with _driver_of(name, _MYSQL_SCHEMES[scheme]):
            from outboxio.storage.mysql.database import MysqlDatabase

            return MysqlDatabase(name, url, direct_url)
    if scheme == "sqlite":
        from outboxio.storage.sqlite.database import SqliteDatabase

        return SqliteDatabase(name, _sqlite_path(name, url))
    raise ConfigurationError(f"shard {name!r} has a URL with the scheme {scheme!r}; expected {_EXPECTED}")


@contextmanager
def _driver_of(name: str, extra: str) -> Generator[None]:
    """Imports of a driver that may not be installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"shard {name!r} needs the driver {error.name}: pip install 'outboxio[{extra}]'"
        ) from error


def _scheme(name: str, url: str) -> str:
    """The URL's scheme; a URL that cannot be read is not shown, for nobody knows where the password ends in it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or not _HOSTS.fullmatch(parts.netloc.rpartition("@")[2]) or _has_late_userinfo(parts):
        raise ConfigurationError(
            f"shard {name!r} has a URL that cannot be read; expected scheme://user:password@host:port/database, where "
            "special characters of user and password are written as %XX"
        )
    return _SAME_SCHEMES.get(parts.scheme, parts.scheme)


def _has_late_userinfo(parts: SplitResult) -> bool:
    """Whether a password with a ``/``, ``?`` or ``#`` in it ended the host too early: its rest is no path to show."""
    if parts.scheme == "sqlite" and not parts.netloc:
        return False
    return "@" in parts.path or "@" in parts.fragment or ("@" in parts.query and "@" not in parts.netloc)


def _sqlite_path(name: str, url: str) -> str | None:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``sqlite://`` or ``sqlite:///:memory:`` for memory."""
    rest = url.removeprefix("sqlite:").removeprefix("//")
    if rest in ("", "/", "/:memory:"):
        return None
    if not rest.startswith("/"):
        host = rest.rpartition("@")[2]
        raise ConfigurationError(f"shard {name!r}: 'sqlite://{host}' names a host; a file is sqlite:///{host}")
    return rest[1:]
