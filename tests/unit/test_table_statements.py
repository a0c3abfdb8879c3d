"""The statements of ``storage/tables``, in the syntax of each dialect."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import pytest
from msgspec import Raw, Struct

from outboxio.storage.__main__ import SYNTAXES, main, statements
from outboxio.storage.statement import Jumps, Query, Statement, Text, as_document, delete, is_document, numbered
from outboxio.storage.syntax import Syntax

EVERY = [pytest.param(s, id=f"{module}.{name}") for module, name, s in statements()]


def syntax(dialect: str) -> Syntax:
    return SYNTAXES[dialect][0]


@pytest.mark.parametrize("dialect", SYNTAXES)
@pytest.mark.parametrize("statement", EVERY)
def test_every_statement_renders_without_markers(statement: Statement, dialect: str) -> None:
    rendered = statement.rendered(syntax(dialect))
    assert not re.search(r"\{[a-z]+[ }]", rendered)
    if dialect == "sqlite":
        assert "eventlog." not in rendered


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("postgres", "SELECT eventlog.events e"),
        ("mysql", "SELECT eventlog.events e FORCE INDEX (events_causation)"),
        ("sqlite", "SELECT eventlog_events AS e INDEXED BY eventlog_events_causation"),
    ],
)
def test_a_table_names_its_index_where_the_dialect_supports_it(dialect: str, text: str) -> None:
    assert Statement("SELECT {table events events_causation e}").rendered(syntax(dialect)) == text


def test_a_text_of_a_dialect_replaces_the_shared_text() -> None:
    statement = Statement("SELECT 1", mysql="SELECT 2")
    assert [statement.rendered(syntax(d)) for d in ("postgres", "mysql", "mariadb")] == [
        "SELECT 1",
        "SELECT 2",
        "SELECT 2",
    ]


def test_mariadb_uses_the_mysql_text_unless_it_has_its_own() -> None:
    statement = Statement("SELECT 1", mysql="SELECT 2", mariadb="SELECT 3")
    assert [statement.rendered(syntax(d)) for d in ("mysql", "mariadb")] == ["SELECT 2", "SELECT 3"]


def test_postgres_runs_a_query_per_value_set_with_a_lateral_join() -> None:
    query = Query("SELECT :name::text, :names, :most", tuple[str, str, int], each="name text, number int")
    assert query.rendered(syntax("postgres")) == (
        "SELECT found.* FROM json_to_recordset(:each::text::json) AS one(name text, number int)"
        " CROSS JOIN LATERAL (\nSELECT one.name::text, :names, :most\n) found"
    )
    assert query.rendered(syntax("mysql")) == "SELECT :name::text, :names, :most"


def test_index_jumps_are_a_recursion_where_the_dialect_needs_it() -> None:
    jumps = Jumps("SELECT a FROM t WHERE a > :start ORDER BY a LIMIT 1")
    for dialect in ("postgres", "sqlite"):
        assert "SELECT a FROM t WHERE a > jumps.value ORDER BY a LIMIT 1" in jumps.rendered(syntax(dialect))
    assert "RECURSIVE" not in jumps.rendered(syntax("mysql"))


def test_parts_replace_markers_and_may_contain_markers_and_dialect_texts() -> None:
    statement = Statement("FROM a {joined} b WHERE {condition}").having(
        joined="{join}", condition=Text("a", sqlite="b")
    )
    assert [statement.rendered(syntax(d)) for d in ("mysql", "sqlite")] == [
        "FROM a STRAIGHT_JOIN b WHERE a",
        "FROM a CROSS JOIN b WHERE b",
    ]
    assert statement.having(joined=",").rendered(syntax("mysql")) == "FROM a , b WHERE a"


def test_marker_arguments_may_contain_markers() -> None:
    rendered = Statement("{text {wanted}}").having(wanted="payload").rendered(syntax("postgres"))
    assert rendered == "payload::text"


def test_a_parameter_used_twice_has_one_number() -> None:
    assert numbered("SELECT :a::text, :b, :a") == ("SELECT $1::text, $2, $1", ["a", "b"])


class Row(Struct, frozen=True):
    id: UUID
    names: tuple[str, ...]
    date: datetime | None = None


ID = UUID(int=7)


def test_rows_of_every_driver_become_the_same_values() -> None:
    date = datetime(2026, 1, 2, 3, 4, 5)
    query = Query("", Row)
    expected = [Row(ID, ("a", "b"), date)]
    assert query.rows([(ID, '["a", "b"]', date)]) == expected
    assert query.rows([(str(ID), '["a", "b"]', "2026-01-02 03:04:05.000000")]) == expected


@pytest.mark.parametrize(
    ("row", "raw", "value"),
    [
        (int, [Decimal(3)], 3),
        (bool, [1], True),
        (tuple[int, str], [1, "x"], (1, "x")),
        (tuple[dict[str, int] | None], [None], (None,)),
        (tuple[dict[str, int] | None], ['{"a": 1}'], ({"a": 1},)),
    ],
)
def test_a_column_has_the_type_named_by_the_query(row: type, raw: Sequence[object], value: object) -> None:
    assert Query("", row).rows([raw]) == [value]


def test_a_malformed_list_of_names_counts_as_empty() -> None:
    assert Query("", tuple[tuple[str, ...], int]).rows([("{}", 1), ('["a"]', 2), ("5", 3)]) == [
        ((), 1),
        (("a",), 2),
        ((), 3),
    ]


def test_a_query_can_leave_out_fields_of_a_struct() -> None:
    assert Query("", Row, fields=("names", "id")).rows([("[]", ID)]) == [Row(ID, ())]


def test_timestamps_in_rows_are_texts_that_sort_by_time() -> None:
    assert as_document([{"date": datetime(2026, 1, 2)}]) == '[{"date":"2026-01-02 00:00:00.000000"}]'


def test_dicts_and_lists_of_dicts_are_sent_as_json() -> None:
    assert all(map(is_document, ({}, Raw(b"1"), [{"a": 1}])))
    assert not any(map(is_document, ("a", 1, ["a"], [], None)))


def test_sqlite_searches_rows_to_delete_without_the_write_lock() -> None:
    statement = delete("pauses", "namespace = :namespace", order="handler_name")
    assert statement.needs is not None
    assert "LIMIT 1" in statement.needs.rendered(syntax("sqlite"))


def test_the_command_prints_statements_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mysql", "subscriptions"]) == 0
    printed = capsys.readouterr().out
    assert "-- subscriptions.FORGET\nDELETE FROM eventlog.subscriptions WHERE namespace = @namespace" in printed
    assert "operations." not in printed


def test_the_command_omits_statements_of_tables_the_dialect_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sqlite", "partitions"]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_lists_the_supported_dialects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["oracle"]) == 2
    assert "{postgres|mysql|mariadb|sqlite}" in capsys.readouterr().err
