"""Which statements would end an action's transaction: found before they are sent."""

from __future__ import annotations

import time

import pytest

from outboxio.transaction import _ENDS_TRANSACTION as ENDS


@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT", "commit", "Commit;", "COMMIT AND CHAIN", "COMMIT WORK", "  \n\t COMMIT", ";COMMIT", " ; ; commit",
        "-- a comment\nCOMMIT", "/* a comment */COMMIT", "/* one */ -- two\n /* three\n */ COMMIT", "/**/COMMIT",
        "COMMIT/* after */", "COMMIT--after", "END", "end;", "END TRANSACTION", "ABORT", "BEGIN", "BEGIN;",
        "begin immediate", "BEGIN ISOLATION LEVEL SERIALIZABLE", "START TRANSACTION", "start\n transaction read only",
        "PREPARE TRANSACTION 'x'", "ROLLBACK", "rollback;", "ROLLBACK WORK", "ROLLBACK TRANSACTION",
        "ROLLBACK AND CHAIN", "ROLLBACK PREPARED 'x'", "COMMIT PREPARED 'x'",
    ],
)  # fmt: skip
def test_an_ending_is_found(sql: str) -> None:
    assert ENDS.match(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "", ";", "-- COMMIT", "/* COMMIT */", "/* COMMIT", "SELECT 'COMMIT'", "SELECT 1 -- COMMIT\n",
        "UPDATE commits SET x = 1", "commits", "ENDED", "end_of_day()", "SAVEPOINT a", "RELEASE SAVEPOINT a",
        "ROLLBACK TO a", "rollback to savepoint a",
        "ROLLBACK WORK TO a", "ROLLBACK TRANSACTION TO SAVEPOINT a", "ROLLBACK  \n TO a", "PREPARE plan AS SELECT 1",
        "START REPLICATION", "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", "BEGINNING",
        "INSERT INTO x VALUES ('; COMMIT')",
        "WITH a AS (SELECT 1) SELECT * FROM a", "DO $$ BEGIN NULL; END $$", "CREATE TRIGGER t BEFORE INSERT ON x BEGIN",
    ],
)  # fmt: skip
def test_anything_else_is_let_through(sql: str) -> None:
    assert not ENDS.match(sql)


def test_many_comments_take_no_time() -> None:
    started = time.perf_counter()
    for comment in ("/**/", "/* a */ ", "-- a\n", " ", ";", "/*/*/*/"):
        assert not ENDS.match(comment * 5_000 + "SELECT 1")
        assert not ENDS.match(comment * 5_000)
    assert time.perf_counter() - started < 1
