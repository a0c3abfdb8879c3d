"""A long SQL string is scanned once, in time proportional to its length."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from outboxio.storage.transaction_endings import MYSQL, POSTGRES, first_ending

READERS: list[Callable[[str], str | None]] = [first_ending, POSTGRES.ending_in, MYSQL.ending_in]
everywhere = pytest.mark.parametrize("ending_in", READERS, ids=["sqlite", "postgres", "mysql"])

PIECES = (
    "/**/", "/* a */ ", "-- a\n", " ", ";", "/*/*/*/", "'", "''", "E'", "E'a'\n", "$", "$$", "$a$", "$a$b", '"', "`",
    "/*", "*/", "/*!", "COMMIT ", "COMMIT TO ", "ROLLBACK ", "ROLLBACK  ", "BEGIN ATOMIC ", "CASE ", "END ", "\\",
    "E'\\", "CREATE FUNCTION ", "a", "START ", "#", "--", "SET ", "CREATE ",
)  # fmt: skip


@everywhere
@pytest.mark.parametrize("piece", PIECES)
def test_a_long_string_is_scanned_once(ending_in: Callable[[str], str | None], piece: str) -> None:
    started = time.process_time()
    for before in ("", "SELECT 1; ", "CREATE FUNCTION f() BEGIN ATOMIC; ", "SELECT '"):
        ending_in(before + piece * 5_000 + "SELECT 1; COMMITTED")
        ending_in(before + piece * 5_000 + "; COMMIT")
    assert time.process_time() - started < 2
