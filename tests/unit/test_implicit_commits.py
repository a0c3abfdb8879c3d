"""Statements that MySQL and MariaDB commit implicitly: refused after a write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outboxio.storage.connections.driver import DEFAULT_LIMITS
from outboxio.storage.mysql.flavour import MYSQL, Server
from outboxio.storage.mysql.session import MysqlSession

COMMITTING = [
    "CREATE TABLE t (id INT)", "create unique index i ON t (id)", "-- now\nDROP TABLE t",
    "/* x */ ALTER TABLE t ADD c INT",
    "# x\nTRUNCATE t", "TRUNCATE TABLE t", "RENAME TABLE a TO b", "LOCK TABLES t WRITE", "UNLOCK TABLES",
    "GRANT SELECT ON a.* TO b", "set autocommit = 1", "SET @@autocommit = 1", "ANALYZE TABLE t",
    "CREATE OR REPLACE VIEW v AS SELECT 1",
]  # fmt: skip
HARMLESS = [
    "INSERT INTO create_table VALUES (1)", "SELECT 'DROP TABLE t'", "CREATE TEMPORARY TABLE t (id INT)",
    "DROP TEMPORARY TABLE t", "UPDATE locks SET state = 'x'", "SET @a = 1",
    "SAVEPOINT created", "SELECT 1 /* DROP TABLE t */",
    "WITH a AS (SELECT 1) SELECT * FROM a", "CALL drop_it()", "SHOW CREATE TABLE t", "EXPLAIN SELECT 1",
]  # fmt: skip


def session(*, has_run: bool) -> Any:
    session = MysqlSession(SimpleNamespace(server_status=0), Server(MYSQL, DEFAULT_LIMITS, lambda connection: None))
    session._has_run = has_run
    return session


@pytest.mark.parametrize("statement", COMMITTING)
def test_an_implicit_commit_is_detected_after_a_write(statement: str) -> None:
    assert session(has_run=True).would_end(statement) is not None
    assert session(has_run=False).would_end(statement) is None


@pytest.mark.parametrize("statement", HARMLESS)
def test_a_statement_without_an_implicit_commit_is_accepted(statement: str) -> None:
    assert session(has_run=True).would_end(statement) is None


def test_unterminated_comments_are_scanned_in_bounded_time() -> None:
    assert session(has_run=True).would_end("/* a */ -- b\n" * 5000 + "/*") is None
