"""Which statements may change the session on MySQL and MariaDB."""

from __future__ import annotations

import time

import pytest

from outboxio.storage.mysql.connection import may_change_session


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1", "  select * from t where a = %s", "INSERT INTO t VALUES (1)", "\nUPDATE t SET a = 1",
        "DELETE FROM t", "REPLACE INTO t VALUES (1)", "WITH a AS (SELECT 1) SELECT * FROM a", "SHOW TABLES",
        "SAVEPOINT a", "ROLLBACK TO a", "RELEASE SAVEPOINT a", "EXPLAIN SELECT 1", "SELECT 1 FROM settings",
    ],
)  # fmt: skip
def test_plain_reads_and_writes_do_not_change_the_session(sql: str) -> None:
    assert not may_change_session(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SET @a = 1", "SELECT @a := 1", "SELECT 1 INTO @a", "SELECT get_lock('a', 1)", "USE other", "SET ROLE a",
        "CREATE TEMPORARY TABLE t (a INT)", "CALL p()", "LOCK TABLES t WRITE", "PREPARE s FROM 'SELECT 1'", "DO 1",
        "SELECT 1; SET @a = 1", "/* why */ SET ROLE a", "SELECT 'a@example.org'", "HANDLER t OPEN",
        "SET SESSION sql_mode = ''", "BEGIN NOT ATOMIC SET @a = 1; END",
    ],
)  # fmt: skip
def test_other_statements_may_change_the_session(sql: str) -> None:
    assert may_change_session(sql)


def test_a_long_statement_is_scanned_once() -> None:
    started = time.process_time()
    assert not may_change_session("SELECT '" + "a" * 1_000_000 + "'")
    assert may_change_session("SELECT '" + "a" * 1_000_000 + ";'")
    assert time.process_time() - started < 1
