"""Databases that a test can break, or make available late."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.kit.proxy import Proxy, proxy_to


class Fragile:
    """A database that a test can break or make available."""

    def __init__(self, source: Any) -> None:
        self.source = source

    async def breaks(self) -> None: ...
    async def recovers(self) -> None: ...
    async def arrives(self) -> None: ...


@asynccontextmanager
async def breakable(url: str) -> AsyncGenerator[Fragile]:
    """A server that can go down, or an SQLite file that another process can lock."""
    if urlsplit(url).scheme == "sqlite":
        other = sqlite3.connect(urlsplit(url).path[1:], isolation_level=None, timeout=5)
        database = Fragile(url)

        async def lock() -> None:
            other.execute("BEGIN IMMEDIATE")

        async def unlock() -> None:
            other.execute("ROLLBACK")

        database.breaks, database.recovers = lock, unlock  # type: ignore[method-assign]
        try:
            yield database
        finally:
            other.close()
        return
    async with proxy_to(url) as proxy:
        database = Fragile(proxy.url)
        database.breaks, database.recovers = proxy.stop, proxy.start  # type: ignore[method-assign]
        yield database


@asynccontextmanager
async def late(url: str, folder: Path) -> AsyncGenerator[Fragile]:
    """A server that is not running yet, or an SQLite file in a folder that does not exist yet."""
    if urlsplit(url).scheme == "sqlite":
        path = Path(urlsplit(url).path[1:])
        database = Fragile(f"sqlite:///{folder / 'later' / path.name}")

        async def arrive() -> None:
            (folder / "later").symlink_to(path.parent)

        database.arrives = arrive  # type: ignore[method-assign]
        yield database
        return
    proxy = Proxy(url)
    database = Fragile(proxy.url)
    database.arrives = proxy.start  # type: ignore[method-assign]
    try:
        yield database
    finally:
        await proxy.stop()
