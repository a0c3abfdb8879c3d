"""The engine and the sessionmaker, as in any application with SQLAlchemy.

The environment variable ``DATABASE`` is the URL of the database; the default is the SQLite file ``shop.db``.
"""

import os

from sqlalchemy import URL, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mysql": "aiomysql", "mariadb": "aiomysql"}

Sessions = async_sessionmaker[AsyncSession]


def with_driver(url: str) -> URL:
    """Return the URL with its asynchronous driver: ``postgresql://`` becomes ``postgresql+asyncpg://``."""
    parsed = make_url(url)
    dialect = parsed.get_backend_name()
    return parsed.set(drivername=f"{dialect}+{DRIVERS[dialect]}")


url = with_driver(os.environ.get("DATABASE") or "sqlite:///shop.db")
engine = create_async_engine(url)
sessions = async_sessionmaker(engine, expire_on_commit=False)
