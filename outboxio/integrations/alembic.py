"""Alembic: revisions that apply the SQL files of outboxio, and an autogenerate that leaves outboxio's tables alone.

A database of an application has two sets of tables with separate versions: the tables of the application, which Alembic
counts in ``alembic_version``, and the tables of outboxio, which ``schema_versions`` counts. So a revision that calls
:func:`upgrade` and ``outbox.migrate()`` may follow each other in any order.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from outboxio.errors import ConfigurationError, DatabaseError
from outboxio.storage.catalog import CATALOGS
from outboxio.storage.ddl import statements_in
from outboxio.storage.schema import (
    Found,
    SqlFile,
    drops_parts,
    files_to_apply,
    indexes_to_make,
    refuse_foreign,
    refuse_older,
    sql_files,
    statements_left,
    tables_of,
    tells_older,
)
from outboxio.support.log import log_of
from outboxio.support.text import briefly

try:
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError, rev_id
    from sqlalchemy import Connection, inspect
except ImportError as error:  # pragma: no cover
    raise ConfigurationError("outboxio.integrations.alembic needs Alembic: pip install 'outboxio[alembic]'") from error

if TYPE_CHECKING:
    NameKind = Literal[
        "schema", "table", "column", "index", "unique_constraint", "foreign_key_constraint", "check_constraint"
    ]
    ParentKind = Literal["schema_name", "table_name", "schema_qualified_table_name"]
    IncludeName = Callable[[str | None, Any, Any], bool]

__all__ = ["downgrade_refused", "include_name", "include_name_with", "upgrade", "write_revision"]

logger = log_of(__name__)

SHARD = "default"  # in errors; a revision knows one database
SCHEMA, PREFIX = "eventlog", "eventlog_"
_DIALECTS = {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mariadb", "sqlite": "sqlite"}
_ON_SQLITE = frozenset(PREFIX + table for table in tables_of("sqlite"))
_MAKES_SCHEMA = re.compile(r"CREATE (?:SCHEMA|DATABASE) IF NOT EXISTS eventlog\b")
_CALL = re.compile(r"\bupgrade\(\s*op\s*,\s*(?:to\s*=\s*)?(\d+)")
# The answers and statements have no placeholders: a percent sign stands for itself.
_AS_IT_STANDS = {"no_parameters": True}


class Operations(Protocol):
    """The parts of ``alembic.op`` that an upgrade uses."""

    def get_context(self) -> MigrationContext: ...

    def get_bind(self) -> Connection: ...


# --- autogenerate ------------------------------------------------------------------------------


def include_name(name: str | None, type_: NameKind, parent_names: Mapping[ParentKind, str | None]) -> bool:
    """Keep autogenerate away from the tables of outboxio: ``context.configure(include_name=include_name)``.

    The tables are in the schema ``eventlog`` on PostgreSQL, in the database ``eventlog`` on MySQL and MariaDB, and have
    the prefix ``eventlog_`` on SQLite. Without this function, autogenerate would drop these tables on SQLite, and with
    ``include_schemas=True`` on the servers. Where the application filters names too, see :func:`include_name_with`.

    Example::

        context.configure(connection=connection, target_metadata=Base.metadata, include_name=include_name)
    """
    if type_ == "schema":
        return name != SCHEMA
    if parent_names.get("schema_name") is not None:
        return parent_names.get("schema_name") != SCHEMA
    return type_ != "table" or name not in _ON_SQLITE


def include_name_with(own: IncludeName) -> IncludeName:
    """:func:`include_name` together with a function of the application: a name is included if both include it.

    Example::

        def only_ours(name, type_, parent_names):
            return type_ != "schema" or name in (None, "billing")

        context.configure(..., include_schemas=True, include_name=include_name_with(only_ours))
    """
    if not callable(own):
        raise ConfigurationError(f"include_name_with({briefly(own)}): expected a function (name, type_, parent_names)")

    def both(name: str | None, type_: Any, parent_names: Any) -> bool:
        return include_name(name, type_, parent_names) and own(name, type_, parent_names)

    return both


# --- revisions ---------------------------------------------------------------------------------


def upgrade(op: Operations, to: int | None = None, *, since: int = 0) -> None:
    """Apply the SQL files of outboxio inside a revision, up to the version ``to``.

    The tables are those of ``outbox.migrate()``, and ``schema_versions`` is filled alike. Files that were applied are
    passed over, so a revision may run again, also where ``outbox.migrate()`` has made the tables.

    ``to=None`` applies what ``outbox.migrate()`` would apply: all files on a new database; on an older one a file that
    drops a part which an older version of outboxio uses (``..._contract.sql``) waits. A revision with ``to`` does the
    same whichever version of outboxio is installed; the number of a contract file asks for this file, as
    ``migrate(contract=True)`` does, also where later files were applied. ``since`` is the version that the revisions
    before this one have reached. Only ``--sql`` needs ``since``, because there is no database to ask.

    Raises :class:`SchemaNewer`, :class:`SchemaOccupied`, :class:`SchemaMissing` and :class:`SchemaInUse` as
    ``outbox.migrate()`` does, and :class:`ConfigurationError` for an unknown version or dialect.

    Example::

        def upgrade() -> None:
            outboxio.upgrade(op, to=10)  # from outboxio.integrations import alembic as outboxio
    """
    context = op.get_context()
    dialect = _dialect_of(context)
    _refuse_unknown(to, "to", lowest=1)
    _refuse_unknown(since, "since", lowest=0)
    if context.as_sql:
        for file in _files_since(dialect, since, to):
            for statement in statements_in(file.text):
                context.impl.static_output(f"{statement.strip()};")
    else:
        _Upgrade(op.get_bind(), dialect).run(to)


def downgrade_refused(op: object = None) -> NoReturn:
    """Refuse to downgrade: the tables may hold events that no handler has handled yet.

    ``op`` is ignored. A revision whose ``downgrade`` does nothing is an alternative: the tables stay, older versions of
    outboxio refuse newer tables by themselves, and a later :func:`upgrade` finds the tables.

    Always raises :class:`ConfigurationError`.

    Example::

        def downgrade() -> None:
            outboxio.downgrade_refused(op)
    """
    raise ConfigurationError(
        "a revision of outboxio's tables is not downgraded: the tables may hold events that were not handled yet, and "
        "a dropped column cannot be filled again; to go back, restore a backup. To pass over this revision, replace "
        "downgrade_refused(op) by pass: the tables stay, and a later upgrade finds them. To lose the events, drop "
        "the tables there by SQL of your own, such as op.execute('DROP SCHEMA eventlog CASCADE')"
    )


class _Upgrade:
    """Applies files on the connection of a revision."""

    def __init__(self, connection: Connection, dialect: str) -> None:
        self._connection = connection
        self._dialect = dialect
        self._catalog = CATALOGS[dialect]

    def run(self, to: int | None) -> None:
        with self._turn():
            found = self._look()
            files = self._files(found, to)
            indexes = indexes_to_make(SHARD, self._dialect, found)
            refuse_foreign(SHARD, self._dialect, found, indexes)
            has_schema = self._dialect != "sqlite" and inspect(self._connection).has_schema(SCHEMA)
            for statement in statements_left(self._dialect, files, found):
                # CREATE SCHEMA needs a right on the whole database, even if the schema exists.
                if not (has_schema and _MAKES_SCHEMA.search(statement)):
                    self._execute(statement)
            for file in files:
                logger.info("applied sql/%s/%s", self._dialect, file.name, dialect=self._dialect, file=file.name)
            for index in indexes:
                self._execute(index.statements[0])

    def _files(self, found: Found, to: int | None) -> list[SqlFile]:
        contract = any(file.is_contract and file.version == to for file in sql_files(self._dialect))
        files = files_to_apply(SHARD, self._dialect, found, contract=contract)
        files = [file for file in files if to is None or file.version <= to]
        if contract and (dropping := drops_parts(files, found)):
            announced = self._catalog.announced_by_older if tells_older(found) else self._catalog.announced
            refuse_older(SHARD, dropping, self._rows(announced))
        return files

    def _look(self) -> Found:
        columns: dict[str, set[str]] = {}
        for table, column, *_ in self._rows(self._catalog.columns):
            columns.setdefault(table.removeprefix(PREFIX), set()).add(column)
        listed = [(row[0], row[-1 if self._dialect == "sqlite" else 1]) for row in self._rows(self._catalog.indexes)]
        rows = self._rows(self._catalog.version) if "version" in columns.get("schema_versions", ()) else ()
        return Found(
            columns,
            {index.removeprefix(PREFIX) for _, index in listed},
            {version for (version,) in rows},
            primary_keys={table for table, index in listed if index == "PRIMARY"},
        )

    @contextmanager
    def _turn(self) -> Generator[None]:
        """Wait for ``outbox.migrate()`` of other processes. On SQLite, this also begins the transaction."""
        if self._dialect == "sqlite":
            # The driver begins a transaction only before an INSERT, so that each CREATE would commit by itself.
            driver: Any = self._connection.connection.driver_connection
            if not driver.in_transaction:
                self._execute(self._catalog.take_turns)
            yield
            return
        if self._rows(self._catalog.take_turns)[0][0] == 0:
            raise DatabaseError(
                "another process has been migrating for a minute; run the upgrade again when it is done"
            )
        try:
            yield
        finally:
            if self._catalog.end_turn:
                self._rows(self._catalog.end_turn)

    def _rows(self, question: str) -> list[Any]:
        return list(self._connection.exec_driver_sql(question, execution_options=_AS_IT_STANDS))

    def _execute(self, statement: str) -> None:
        self._connection.exec_driver_sql(statement, execution_options=_AS_IT_STANDS)


def _dialect_of(context: MigrationContext) -> str:
    name = context.dialect.name
    if name not in _DIALECTS:
        raise ConfigurationError(f"outboxio has no tables for {name}; expected one of {', '.join(_DIALECTS)}")
    return "mariadb" if getattr(context.dialect, "is_mariadb", False) else _DIALECTS[name]


def _newest() -> int:
    """The newest version of any dialect: the same revision may run on several dialects."""
    return max(sql_files(dialect)[-1].version for dialect in CATALOGS)


def _refuse_unknown(version: Any, parameter: str, *, lowest: int) -> None:
    if version is None and parameter == "to":
        return
    if not isinstance(version, int) or isinstance(version, bool) or not lowest <= version <= _newest():
        raise ConfigurationError(
            f"upgrade({parameter}={briefly(version)}): this outboxio has the versions {lowest} to {_newest()}; "
            "upgrade outboxio, or correct the number"
        )


def _files_since(dialect: str, since: int, to: int | None) -> list[SqlFile]:
    """The files behind ``since``, for a database that cannot be asked.

    An older version may still run, so behind the first revision a contract file is applied only by its own number.
    There ``since`` may be later than the file.
    """
    files = [file for file in sql_files(dialect) if to is None or file.version <= to]
    if not since:
        return files
    return [file for file in files if (file.version == to if file.is_contract else file.version > since)]


# --- writing a revision --------------------------------------------------------------------------


def configuration(path: str) -> Config:
    """The configuration of Alembic in a file. Raises :class:`ConfigurationError` if there is no such file."""
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no Alembic configuration {path!r}: name the file with --config")
    return Config(path, cmd_opts=Namespace(quiet=True))  # the command line says what was written


def write_revision(
    config: Config,
    *,
    message: str = "outboxio tables",
    revision: str | None = None,
    head: str = "head",
    contract: bool = False,
) -> Path | None:
    """Write a revision that brings the tables of outboxio to the newest version; its file.

    The revision is made by Alembic from the template of the application, behind ``head``, with the id ``revision``, or
    a random id. The calls of :func:`upgrade` in the existing revisions say which version is reached; returns ``None``
    if no file is left to apply. A file that drops a part waits for ``contract=True``, except in the first revision.

    Raises :class:`ConfigurationError` with the reason of Alembic, such as several heads.

    Example::

        write_revision(Config("alembic.ini"))
    """
    try:
        scripts = ScriptDirectory.from_config(config)
        calls = _calls_behind(scripts, contract=contract)
        if not calls:
            return None
        script = scripts.generate_revision(
            revision or rev_id(),
            message,
            head=head,
            imports="from outboxio.integrations import alembic as outboxio",
            upgrades="\n    ".join(calls),
            downgrades="outboxio.downgrade_refused(op)",
        )
    except CommandError as error:
        raise ConfigurationError(f"no revision was written: {error}") from error
    return None if script is None else Path(script.path)


def _calls_behind(scripts: ScriptDirectory, *, contract: bool) -> list[str]:
    """The calls of :func:`upgrade` that the next revision needs. A contract file gets a call of its own."""
    asked = [to for script in reversed(list(scripts.walk_revisions())) for to in _asked_by(script)]
    since, files = max(asked, default=0), {file.version: file for dialect in CATALOGS for file in sql_files(dialect)}
    if not asked:
        return [f"outboxio.upgrade(op, to={max(files)})"]
    calls: list[str] = []
    expand = [version for version, file in files.items() if version > since and not file.is_contract]
    if expand:
        calls.append(f"outboxio.upgrade(op, to={max(expand)}, since={since})")
        since = max(expand)
    if contract:  # the first revision has made all parts up to its number
        left = [version for version, file in files.items() if file.is_contract and version > asked[0]]
        calls += [f"outboxio.upgrade(op, to={version}, since={since})" for version in left if version not in asked]
    return calls


def _asked_by(script: Any) -> list[int]:
    """The versions that a revision of the application asks for; none if the revision has no part of outboxio."""
    text = Path(script.path).read_text("utf-8")
    return list(map(int, _CALL.findall(text))) if "outboxio" in text else []
