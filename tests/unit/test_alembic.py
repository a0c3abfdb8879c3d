"""The parts of the Alembic integration that need no database: names, numbers, and generated revisions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from typer.testing import CliRunner

from outboxio import ConfigurationError
from outboxio.cli.app import app
from outboxio.integrations.alembic import downgrade_refused, include_name, include_name_with, upgrade, write_revision
from tests.kit.alembic_project import add_revision, project


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return project(tmp_path, "sqlite:///never-opened.db", template="generic")


@pytest.mark.parametrize(
    ("name", "kind", "schema", "is_included"),
    [
        ("eventlog", "schema", None, False),
        (None, "schema", None, True),
        ("billing", "schema", None, True),
        ("events", "table", "eventlog", False),
        ("events", "table", "billing", True),
        ("eventlog_events", "table", None, False),
        ("eventlog_of_mine", "table", None, True),
        ("eventlog_events", "table", "billing", True),
        ("state", "column", None, True),
    ],
)
def test_only_names_of_outboxio_are_excluded(
    name: str | None, kind: Any, schema: str | None, is_included: bool
) -> None:
    parents: Any = {} if kind == "schema" else {"schema_name": schema}

    assert include_name(name, kind, parents) is is_included


def test_a_user_supplied_filter_also_applies() -> None:
    both = include_name_with(lambda name, kind, parents: name != "legacy")

    assert [both(name, "table", {"schema_name": None}) for name in ("orders", "legacy", "eventlog_events")] == [
        True,
        False,
        False,
    ]


def test_a_filter_that_is_not_a_function_is_refused() -> None:
    given: Any = "orders"
    with pytest.raises(ConfigurationError, match="expected a function"):
        include_name_with(given)


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["to=99", "to=0", "to='5'", "to=True", "to=5, since=-1"])
def test_an_unknown_version_is_refused(config: Config, call: str) -> None:
    add_revision(config, "wrong", f"outboxio.upgrade(op, {call})")

    with pytest.raises(ConfigurationError, match="this version of outboxio has schema versions"):
        command.upgrade(config, "head", sql=True)


def test_a_dialect_without_tables_is_refused() -> None:
    class Oracle:
        dialect = type("Dialect", (), {"name": "oracle"})()

        def get_context(self) -> Any:
            return self

        def get_bind(self) -> Any: ...

    with pytest.raises(ConfigurationError, match="does not support oracle"):
        upgrade(Oracle())


def test_a_downgrade_is_refused_with_the_reason_and_alternatives(config: Config) -> None:
    write_revision(config, revision="first")

    with pytest.raises(ConfigurationError, match=r"not handled yet.*pass.*DROP SCHEMA"):
        command.downgrade(config, "first:base", sql=True)
    with pytest.raises(ConfigurationError):
        downgrade_refused()


# --- what is printed, and what is written -----------------------------------------------------------------


def printed(config: Config) -> str:
    command.upgrade(config, "head", sql=True)
    assert isinstance(config.output_buffer, io.StringIO)
    return config.output_buffer.getvalue()


def test_a_printed_revision_has_only_the_files_after_the_previous_version(config: Config) -> None:
    config.set_main_option("sqlalchemy.url", "postgresql://")
    add_revision(config, "later", "outboxio.upgrade(op, since=4)")

    text = printed(config)

    assert "0005_partitions.sql" in text
    assert "0004_" not in text
    assert "0006_" not in text, "a contract file is only printed on request"


def test_a_printed_contract_file_stands_alone_after_later_files(config: Config) -> None:
    config.set_main_option("sqlalchemy.url", "postgresql://")
    add_revision(config, "contract", "outboxio.upgrade(op, to=6, since=7)")

    text = printed(config)

    assert "DROP INDEX" in text
    assert "0006_partitions_contract.sql" in text
    assert "0005_" not in text
    assert "0007_" not in text


def test_the_first_printed_revision_has_every_file_up_to_its_version(config: Config) -> None:
    config.set_main_option("sqlalchemy.url", "postgresql://")
    add_revision(config, "first", "outboxio.upgrade(op, to=6)")

    text = printed(config)

    assert "0006_partitions_contract.sql" in text
    assert "0007_" not in text


def written(path: Path | None) -> list[str]:
    assert path is not None
    return [line.strip() for line in path.read_text().splitlines() if "outboxio.upgrade" in line]


def test_a_generated_revision_continues_after_the_previous_revisions(config: Config) -> None:
    assert written(write_revision(config)) == ["outboxio.upgrade(op, to=12)"]
    assert write_revision(config) is None, "the newest version is reached"
    assert write_revision(config, contract=True) is None, "the first revision has made all tables"


def test_after_an_older_revision_the_contract_file_needs_its_own_revision(config: Config) -> None:
    add_revision(config, "first", "outboxio.upgrade(op, to=4)")

    assert written(write_revision(config)) == ["outboxio.upgrade(op, to=12, since=4)"]
    assert write_revision(config) is None
    assert written(write_revision(config, contract=True)) == ["outboxio.upgrade(op, to=6, since=12)"]
    assert write_revision(config, contract=True) is None


def test_both_steps_in_one_revision_are_two_calls(config: Config) -> None:
    add_revision(config, "first", "outboxio.upgrade(op, to=4)")

    assert written(write_revision(config, contract=True)) == [
        "outboxio.upgrade(op, to=12, since=4)",
        "outboxio.upgrade(op, to=6, since=12)",
    ]
    assert write_revision(config, contract=True) is None


@pytest.mark.parametrize(
    "calls",
    [
        ["outboxio.upgrade(op, to=6)"],
        ["outboxio.upgrade(op, to=4)", "outboxio.upgrade(op, to=6, since=4)"],
        ["outboxio.upgrade(op, to=4)", "outboxio.upgrade(op, to=5, since=4)", "outboxio.upgrade(op, to=6, since=5)"],
    ],
    ids=["first", "both-steps", "step-by-step"],
)
def test_a_contract_file_is_not_requested_twice(config: Config, calls: list[str]) -> None:
    for number, call in enumerate(calls):
        add_revision(config, f"r{number}", call)

    assert written(write_revision(config, contract=True)) == ["outboxio.upgrade(op, to=12, since=6)"]


def test_a_generated_revision_is_valid_for_alembic(config: Config) -> None:
    command.revision(config, rev_id="before", message="orders")

    path = write_revision(config, revision="ours", message="event tables")

    assert path is not None
    assert path.name == "ours_event_tables.py"
    assert "Revises: before" in path.read_text()
    assert "outboxio.downgrade_refused(op)" in path.read_text()


def test_the_reason_from_alembic_is_reported(config: Config) -> None:
    command.revision(config, rev_id="one", message="one")
    command.revision(config, rev_id="two", message="two", head="base", splice=True)

    with pytest.raises(ConfigurationError, match="Multiple heads"):
        write_revision(config)


def test_the_command_writes_a_revision_and_prints_its_path(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    first = CliRunner().invoke(app, ["alembic-revision", "--rev-id", "ours", "--json"])
    again = CliRunner().invoke(app, ["alembic-revision", "--json"])
    nowhere = CliRunner().invoke(app, ["alembic-revision", "--config", "nowhere.ini"])

    assert json.loads(first.stdout)["written"].endswith("ours_outboxio_tables.py")
    assert json.loads(again.stdout) == {"written": None}
    assert nowhere.exit_code == 2
