"""Every column that a migration adds is in every INSERT and SELECT."""

from __future__ import annotations

from outboxio.model.notification import COPIED
from outboxio.storage.ddl import parts_of
from outboxio.storage.postgres import events, insertion, session
from outboxio.storage.schema import sql_files
from outboxio.storage.tables import notifications

#: Columns with a value of the database's own: a default, or an identity.
MADE_BY_THE_DATABASE = {"events": {"sequence"}, "event_notifications": {"errors"}}


def columns_of(table: str) -> set[str]:
    parts = [part for file in sql_files("postgres") for part in parts_of(file.text)]
    return {part.name for part in parts if part.kind == "column" and part.table == table}


def test_an_event_is_inserted_with_all_columns() -> None:
    assert set(insertion._VALUES) == columns_of("events") - MADE_BY_THE_DATABASE["events"]


def test_fan_out_and_inbox_create_notifications_with_all_columns() -> None:
    assert set(events._MADE) == columns_of("event_notifications") - MADE_BY_THE_DATABASE["event_notifications"]
    assert set(session._NEW) == columns_of("event_notifications")


def test_an_operator_sees_all_columns_of_a_notification() -> None:
    assert set(notifications._FIELDS) == columns_of("event_notifications")


def test_the_copied_columns_are_columns_of_both_tables() -> None:
    assert set(COPIED) <= columns_of("events") & columns_of("event_notifications")
