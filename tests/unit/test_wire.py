"""Counting statements on the wire."""

from __future__ import annotations

import sqlite3

import pytest

from tests.kit.wire import number_of_statements, statements_in, watched


@pytest.mark.parametrize(
    ("message", "number"),
    [
        ("SELECT 1", 1),
        ("SELECT 1;", 1),
        ("BEGIN; SELECT 1; COMMIT", 3),
        ("SELECT 'a;b', `c;d`", 1),
        ("INSERT INTO t VALUES ('it''s; fine'); UPDATE t SET a = '' ; COMMIT; ", 3),
        (r"INSERT INTO t VALUES ('\\'); UPDATE t SET a = '\\\'; ' ; COMMIT", 3),
        (r"INSERT INTO t VALUES ('it''s; fine', 'so \'; is this'); COMMIT", 2),
    ],
)
def test_a_message_may_contain_several_statements(message: str, number: int) -> None:
    assert len(statements_in(message)) == number
    assert number_of_statements(message.encode()) == number


def test_statements_on_sqlite_are_counted_while_watched() -> None:
    with watched(keeps_texts=True) as wire:
        connection = sqlite3.connect(":memory:")
        connection.execute("SELECT 1")
        connection.cursor().execute("SELECT 2")
        connection.close()
    connection = sqlite3.connect(":memory:")
    connection.execute("SELECT 3")
    connection.close()
    assert wire.texts == ["SELECT 1", "SELECT 2"]
