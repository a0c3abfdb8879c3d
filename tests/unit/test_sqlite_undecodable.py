"""Which SQLite errors mean an undecodable value and not a busy or broken database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from outboxio.storage.sqlite.errors import is_undecodable


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


@pytest.mark.parametrize("sql", ["SELECT json_array(X'ff')", "SELECT CAST(X'ff' AS TEXT)"])
def test_bytes_instead_of_text_are_undecodable(connection: sqlite3.Connection, sql: str) -> None:
    with pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute(sql).fetchone()

    assert is_undecodable(refused.value)


@pytest.mark.parametrize("sql", ["SELECT * FROM nowhere", "SELECT json_array(", "SELECT json('{')"])
def test_an_invalid_statement_does_not_mean_an_undecodable_row(connection: sqlite3.Connection, sql: str) -> None:
    with pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute(sql).fetchone()

    assert not is_undecodable(refused.value)


def test_a_busy_database_does_not_mean_an_undecodable_row(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("busy") / "app.db"
    first, second = sqlite3.connect(path, isolation_level=None), sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        first.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError) as refused:
            second.execute("BEGIN EXCLUSIVE")
    finally:
        first.close()
        second.close()

    assert not is_undecodable(refused.value)
