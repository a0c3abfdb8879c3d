"""The engine and the sessions. ``DATABASE_URL`` is the address of the database, by default an SQLite file."""

import os

from sqlalchemy import URL, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mysql": "aiomysql", "mariadb": "aiomysql"}

Sessions = async_sessionmaker[AsyncSession]


def with_driver(address: str) -> URL:
    """Return the URL with its asynchronous driver: ``postgresql://`` becomes ``postgresql+asyncpg://``."""
    parsed = make_url(address)
    dialect = parsed.get_backend_name()
    return parsed.set(drivername=f"{dialect}+{DRIVERS[dialect]}")


url = with_driver(os.environ.get("DATABASE_URL") or "sqlite:///service.db")
engine = create_async_engine(url)
sessions = async_sessionmaker(engine, expire_on_commit=False)
