"""Which errors of SQLite say that a value cannot be read, and not that the database is busy or broken."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from outboxio.storage.sqlite.errors import cannot_be_read


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


@pytest.mark.parametrize("sql", ["SELECT json_array(X'ff')", "SELECT CAST(X'ff' AS TEXT)"])
def test_bytes_where_text_belongs_cannot_be_read(connection: sqlite3.Connection, sql: str) -> None:
    with pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute(sql).fetchone()

    assert cannot_be_read(refused.value)


@pytest.mark.parametrize("sql", ["SELECT * FROM nowhere", "SELECT json_array(", "SELECT json('{')"])
def test_what_is_wrong_with_a_statement_says_nothing_of_a_row(connection: sqlite3.Connection, sql: str) -> None:
    with pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute(sql).fetchone()

    assert not cannot_be_read(refused.value)


def test_a_database_that_is_busy_says_nothing_of_a_row(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("busy") / "app.db"
    first, second = sqlite3.connect(path, isolation_level=None), sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        first.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError) as refused:
            second.execute("BEGIN EXCLUSIVE")
    finally:
        first.close()
        second.close()

    assert not cannot_be_read(refused.value)
