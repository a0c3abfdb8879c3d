"""Statements that would end an action's transaction are detected before they are sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outboxio.storage.transaction_endings import (
    MYSQL,
    MYSQL_NOT_ESCAPING,
    POSTGRES,
    POSTGRES_ESCAPING,
    Lexicon,
    first_ending,
)

LEXICONS = {"postgres": POSTGRES, "mysql": MYSQL}
EVERYWHERE: list[Callable[[str], str | None]] = [first_ending, POSTGRES.ending_in, MYSQL.ending_in]
everywhere = pytest.mark.parametrize("ending_in", EVERYWHERE, ids=["sqlite", "postgres", "mysql"])


@everywhere
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
def test_an_ending_is_detected(ending_in: Callable[[str], str | None], sql: str) -> None:
    assert ending_in(sql)


@everywhere
@pytest.mark.parametrize(
    "sql",
    [
        "", ";", "-- COMMIT", "/* COMMIT */", "/* COMMIT", "SELECT 'COMMIT'", "SELECT 1 -- COMMIT\n",
        "UPDATE commits SET x = 1", "commits", "ENDED", "end_of_day()", "SAVEPOINT a", "RELEASE SAVEPOINT a",
        "ROLLBACK TO a", "rollback to savepoint a",
        "ROLLBACK WORK TO a", "ROLLBACK TRANSACTION TO SAVEPOINT a", "ROLLBACK  \n TO a", "PREPARE plan AS SELECT 1",
        "START REPLICATION", "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", "FIRST_POSITION",
        "INSERT INTO x VALUES ('; COMMIT')",
        "WITH a AS (SELECT 1) SELECT * FROM a", "DO $$ BEGIN NULL; END $$", "CREATE TRIGGER t BEFORE INSERT ON x BEGIN",
    ],
)  # fmt: skip
def test_other_statements_are_accepted(ending_in: Callable[[str], str | None], sql: str) -> None:
    assert ending_in(sql) is None


BEHIND = [
    "INSERT INTO d VALUES (1); COMMIT; BEGIN", "INSERT INTO d VALUES (1);COMMIT AND CHAIN", "SELECT 1; ROLLBACK; BEGIN",
    "SELECT 1;\n-- now\n  commit", "SELECT 1; /* now */ COMMIT", "SELECT ';'; COMMIT", "SELECT 'a''b'; COMMIT",
    "SELECT 1;;;COMMIT", "SELECT 1; START  TRANSACTION", "SELECT 1; SELECT 2; COMMIT", "SELECT 1; BEGIN",
    "SELECT '--'; COMMIT", "SELECT '/*'; COMMIT", "SELECT 'COMMIT'; COMMIT",
]  # fmt: skip
HIDDEN = [
    "SELECT '; COMMIT'", "SELECT 1; SELECT 'COMMIT'", "SELECT 'it''s; COMMIT'", "SELECT 1 -- ; COMMIT",
    "SELECT 1 /* ; COMMIT */", "SELECT 1; /* COMMIT */", "SELECT 1; -- COMMIT", "SELECT 1; UPDATE commits SET a = 1",
    "SELECT 1; ROLLBACK TO a", "SELECT 1; ROLLBACK WORK TO SAVEPOINT a", "SELECT 1; SELECT commit", "SELECT 1;",
    "SELECT CASE WHEN a THEN 1 END; SELECT 2", "SELECT '; COMMIT", "SELECT 1 /* ; COMMIT",
]  # fmt: skip


@pytest.mark.parametrize("lexicon", LEXICONS.values(), ids=LEXICONS)
@pytest.mark.parametrize("sql", BEHIND)
def test_an_ending_after_other_statements_is_detected(lexicon: Lexicon, sql: str) -> None:
    assert lexicon.ending_in(sql)


@pytest.mark.parametrize("lexicon", LEXICONS.values(), ids=LEXICONS)
@pytest.mark.parametrize("sql", HIDDEN)
def test_endings_in_literals_names_and_comments_are_ignored(lexicon: Lexicon, sql: str) -> None:
    assert lexicon.ending_in(sql) is None


@pytest.mark.parametrize(
    ("sql", "ending"),
    [
        # Literals that only PostgreSQL has.
        ("SELECT $$; COMMIT$$", None), ("SELECT $a$ $$ ; COMMIT; $b$ $a$", None), ("SELECT $a$x$a$; COMMIT", "COMMIT"),
        ("SELECT $1; COMMIT", "COMMIT"), ("SELECT a$b$; COMMIT; SELECT c$b$", "COMMIT"),
        ("SELECT $é$; COMMIT$é$", None), ("DO $$ BEGIN NULL; END $$; COMMIT", "COMMIT"),
        (r"SELECT E'\'; COMMIT'", None), (r"SELECT e'\\'; COMMIT", "COMMIT"), (r"SELECT '\'; COMMIT", "COMMIT"),
        (r"SELECT somE'\'; COMMIT", "COMMIT"), ("SELECT E'a'\n'\\'; COMMIT'", None), ("SELECT E'a' '; COMMIT'", None),
        ('SELECT "; COMMIT"', None), ('SELECT "a""b; COMMIT"', None), ('SELECT "a"; COMMIT', "COMMIT"),
        ("SELECT U&'\\0041; COMMIT'", None), ("SELECT 1; `COMMIT`", None),
        # Nested comments.
        ("/* /* */ COMMIT */ SELECT 1", None), ("/* /* */ */ COMMIT", "COMMIT"),
        ("SELECT 1; /* /* */ */ COMMIT", "COMMIT"),
        ("SELECT 1 /* /* ; */ ; COMMIT */", None), ("/* /* */", None), ("--a\n--b\nCOMMIT", "COMMIT"),
        # Statements that contain statements.
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC INSERT INTO d VALUES (1); SELECT 1; END", None),
        ("CREATE OR REPLACE FUNCTION f() BEGIN ATOMIC SELECT CASE a WHEN 1 THEN 2 END; END; COMMIT", "COMMIT"),
        ("CREATE PROCEDURE p() BEGIN ATOMIC SELECT 1; END; SELECT 1; END", "END"),
        ("CREATE TABLE t (n INT); COMMIT", "COMMIT"), ("CREATE TABLE t (n INT); CREATE TABLE u (n INT)", None),
        ("SELECT 1; ABORT", "ABORT"), ("SELECT 1; END", "END"),
        ("SELECT 1; PREPARE TRANSACTION 'x'", "PREPARE TRANSACTION"),
    ],
)  # fmt: skip
def test_statements_are_parsed_like_postgres_does(sql: str, ending: str | None) -> None:
    assert POSTGRES.ending_in(sql) == ending


@pytest.mark.parametrize(
    ("sql", "ending"),
    [
        (r"SELECT '\'; COMMIT'", None), (r"SELECT '\\'; COMMIT", "COMMIT"), (r'SELECT "\"; COMMIT"', None),
        ("SELECT `; COMMIT`", None), ("SELECT `a``; COMMIT`", None), ('SELECT "; COMMIT"', None),
        ("SELECT 1 # ; COMMIT", None), ("SELECT 1; # now\nCOMMIT", "COMMIT"), ("SELECT 1--1; COMMIT", "COMMIT"),
        ("SELECT 1 -- 1; COMMIT", None), ("SELECT 1 /* /* */; COMMIT", "COMMIT"), ("SELECT 1; $$COMMIT$$", None),
        # The content of such a comment is executed.
        ("/*! COMMIT */", "COMMIT"), ("/*!50000 COMMIT */", "COMMIT"), ("SELECT 1 /*!; COMMIT */", "COMMIT"),
        ("SELECT 1; /*M!100100 COMMIT */", "COMMIT"), ("SELECT 1 /*! + 1 */; COMMIT", "COMMIT"),
        # A statement with an implicit commit ends the transaction also behind other statements.
        ("INSERT INTO d VALUES (1); CREATE TABLE t (n INT)", "CREATE TABLE"), ("SELECT 1; TRUNCATE d", "TRUNCATE"),
        ("SELECT 1; CREATE TEMPORARY TABLE t (n INT)", None), ("CREATE TABLE t (n INT); SELECT 1", None),
        ("SELECT 1; SET autocommit = 1", "SET autocommit"), ("SELECT 1; END", None),
    ],
)  # fmt: skip
def test_statements_are_parsed_like_mysql_does(sql: str, ending: str | None) -> None:
    assert MYSQL.ending_in(sql) == ending


def test_the_backslash_mode_of_the_session_is_respected() -> None:
    assert POSTGRES_ESCAPING.ending_in(r"SELECT '\'; COMMIT'") is None
    assert POSTGRES.ending_in(r"SELECT '\'; COMMIT; SELECT '") == "COMMIT"
    assert MYSQL_NOT_ESCAPING.ending_in(r"SELECT '\'; COMMIT; SELECT '") == "COMMIT"
