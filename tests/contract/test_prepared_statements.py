"""Every database accepts every statement of ``storage/tables``."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from outboxio import Outbox
from outboxio.storage.__main__ import SYNTAXES, statements
from outboxio.storage.statement import numbered, with_placeholders
from tests.kit import mysql
from tests.kit.app import Look


class Nothing(dict[str, Any]):
    """NULL for every parameter."""

    def __missing__(self, name: str) -> None:
        return None


async def refused_by_postgres(url: str, texts: Iterable[str]) -> list[str]:
    connection, refused = await asyncpg.connect(url), list[str]()
    try:
        for text in texts:
            try:
                await connection.prepare(numbered(text)[0])
            except asyncpg.PostgresError as error:
                refused.append(f"{error}: {text}")
    finally:
        await connection.close()
    return refused


async def refused_by_mysql(url: str, texts: Iterable[str]) -> list[str]:
    refused = list[str]()
    async with mysql.connected(url) as connection:
        for text in texts:
            try:
                await mysql.fetch(connection, "PREPARE s FROM %s", (with_placeholders(text, lambda _: "?"),))
            except Exception as error:
                refused.append(f"{error}: {text}")
    return refused


def refused_by_sqlite(url: str, texts: Iterable[str]) -> list[str]:
    connection, refused = sqlite3.connect(Path(urlsplit(url).path[1:])), list[str]()
    try:
        for text in texts:
            try:
                connection.execute(f"EXPLAIN {text}", Nothing()).close()
            except sqlite3.Error as error:
                refused.append(f"{error}: {text}")
    finally:
        connection.close()
    return refused


async def test_every_statement_of_the_tables_can_be_prepared(outbox: Outbox, look: Look) -> None:
    syntax, _ = SYNTAXES[look.dialect]
    missing = {"partitions"} if look.is_file else set[str]()  # SQLite has no partitions
    rendered = [statement.rendered(syntax) for table, _, statement in statements() if table not in missing]
    texts = [text for several in rendered for text in several.split(";\n") if text]
    if look.is_file:
        refused = await asyncio.to_thread(refused_by_sqlite, look.url, texts)
    else:
        prepare = refused_by_postgres if look.driver == "asyncpg" else refused_by_mysql
        refused = await prepare(look.url, texts)
    assert refused == []
    assert len(texts) > 50
