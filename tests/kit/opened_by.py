"""Two switches, which can be combined.

- ``OUTBOXIO_TEST_OPENED_BY=engine`` opens every outbox by an engine of SQLAlchemy over the same URL.
  ``OUTBOXIO_TEST_OPENED_BY=asyncmy`` does the same, with all engines on MySQL and MariaDB over asyncmy.
- ``OUTBOXIO_TEST_DRIVER=psycopg`` opens outboxes, engines and sessions on PostgreSQL over psycopg.

The processes that tests start import this module, so it does not import pytest, which would be a third of their start.
"""

from __future__ import annotations

import os
from typing import Any

import outboxio.outbox
from outboxio.storage import Shard, open_database

SIZE = 20  # connections, as many as outboxio's own pool has

OPENED_BY = os.environ.get("OUTBOXIO_TEST_OPENED_BY")
BY_ENGINE = OPENED_BY is not None

#: The driver of engines on MySQL and MariaDB.
OF_MYSQL = "asyncmy" if OPENED_BY == "asyncmy" else "aiomysql"
OVER_PSYCOPG = os.environ.get("OUTBOXIO_TEST_DRIVER") == "psycopg"
POSTGRES_DRIVER = "psycopg" if OVER_PSYCOPG else "asyncpg"

_DRIVERS = {
    "postgres": f"postgresql+{POSTGRES_DRIVER}",
    "postgresql": f"postgresql+{POSTGRES_DRIVER}",
    "mysql": f"mysql+{OF_MYSQL}",
    "mariadb": f"mariadb+{OF_MYSQL}",
    "sqlite": "sqlite+aiosqlite",
}


def engine_url(url: str) -> str:
    """The URL of outboxio as a URL of SQLAlchemy. A URL that names its driver is one already."""
    scheme, _, rest = url.partition(":")
    return url if "+" in scheme else f"{_DRIVERS[scheme]}:{rest}"


def open_by_engine(name: str, source: Any, **access: Any) -> Any:
    """The database of a shard, opened by an engine. The engine is disposed of when the database is closed."""
    from sqlalchemy.ext.asyncio import create_async_engine

    url = source.url if isinstance(source, Shard) else source
    if not isinstance(url, str) or not _has_engine(url):
        return open_database(name, source, **access)
    pooled: Any = {} if url.startswith("sqlite") else {"pool_size": SIZE, "max_overflow": 0}
    engine = create_async_engine(engine_url(url), **pooled)
    given = Shard(engine, direct_url=source.direct_url) if isinstance(source, Shard) else engine
    database: Any = open_database(name, given, **access)
    close = database.close

    async def close_all() -> None:
        await close()
        await engine.dispose()

    database.close = close_all
    return database


def _has_engine(url: str) -> bool:
    """False for a database in memory, and for options and forms that only the URLs of outboxio have."""
    scheme, _, rest = url.partition(":")
    if scheme not in _DRIVERS or "?" in rest or "," in rest:
        return False
    return scheme != "sqlite" or rest.removeprefix("//") not in ("", "/", "/:memory:")


def open_over_psycopg(name: str, source: Any, **access: Any) -> Any:
    """The database of a shard, whose URL on PostgreSQL names psycopg."""
    if isinstance(source, str):
        source = _over_psycopg(source)
    elif isinstance(source, Shard) and isinstance(source.url, str):
        source = Shard(_over_psycopg(source.url), source.direct_url)
    return open_database(name, source, **access)


def _over_psycopg(url: str) -> str:
    scheme, _, rest = url.partition(":")
    return f"postgresql+psycopg:{rest}" if scheme in ("postgres", "postgresql") else url


def use() -> None:
    """Open outboxes through engines or over psycopg from now on, if the environment requests it."""
    if OVER_PSYCOPG:
        import psycopg  # noqa: F401  # like SQLAlchemy below

        outboxio.outbox.open_database = open_over_psycopg
    if BY_ENGINE:
        import sqlalchemy  # noqa: F401  # when imported, it sets the level of its logger, which no test may do

        outboxio.outbox.open_database = open_by_engine  # type: ignore[assignment]
