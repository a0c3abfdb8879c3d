"""Alembic: revisions that apply outboxio's SQL files, and an autogenerate filter that ignores outboxio's tables.

Your database has two sets of tables with separate versions: Alembic records the version of your application's tables in
``alembic_version``, and outboxio records its own in ``schema_versions``. So a revision that calls :func:`upgrade` and
``outbox.migrate()`` may run in any order.
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
    distinguishes_older,
    drops_parts,
    files_to_apply,
    indexes_to_create,
    refuse_external_tables,
    refuse_older,
    remaining_statements,
    sql_files,
    tables_of,
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

SHARD = "default"  # for errors; a revision runs on one database
SCHEMA, PREFIX = "eventlog", "eventlog_"
_DIALECTS = {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mariadb", "sqlite": "sqlite"}
_ON_SQLITE = frozenset(PREFIX + table for table in tables_of("sqlite"))
_MAKES_SCHEMA = re.compile(r"CREATE (?:SCHEMA|DATABASE) IF NOT EXISTS eventlog\b")
_CALL = re.compile(r"\bupgrade\(\s*op\s*,\s*(?:to\s*=\s*)?(\d+)")
# The statements have no placeholders: a percent sign is literal.
_NO_PARAMETERS = {"no_parameters": True}


class Operations(Protocol):
    """The parts of ``alembic.op`` that an upgrade uses."""

    def get_context(self) -> MigrationContext: ...

    def get_bind(self) -> Connection: ...


# --- autogenerate ------------------------------------------------------------------------------


def include_name(name: str | None, type_: NameKind, parent_names: Mapping[ParentKind, str | None]) -> bool:
    """Exclude outboxio's tables from autogenerate: ``context.configure(include_name=include_name)``.

    The tables are in the schema ``eventlog`` on PostgreSQL, in the database ``eventlog`` on MySQL and MariaDB, and have
    the prefix ``eventlog_`` on SQLite. Without this function, autogenerate would drop them on SQLite, and on the other
    databases with ``include_schemas=True``. To combine it with a filter of your own, see :func:`include_name_with`.

    Example::

        context.configure(connection=connection, target_metadata=Base.metadata, include_name=include_name)
    """
    if type_ == "schema":
        return name != SCHEMA
    if parent_names.get("schema_name") is not None:
        return parent_names.get("schema_name") != SCHEMA
    return type_ != "table" or name not in _ON_SQLITE


def include_name_with(own: IncludeName) -> IncludeName:
    """Combine :func:`include_name` with your own filter: a name is included if both include it.

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
    """Apply outboxio's SQL files in a revision, up to version ``to``.

    The result is the same as that of ``outbox.migrate()``, including ``schema_versions``. Files that have already been
    applied are skipped, so the revision may run again, even after ``outbox.migrate()``.

    ``to=None`` applies what ``outbox.migrate()`` would apply: all files on a new database; on an existing one, all
    except contract files (``..._contract.sql``), which drop parts that older versions of outboxio use. With ``to``, a
    revision does the same with every later version of outboxio. If ``to`` is the number of a contract file, that file
    is applied, as by ``migrate(contract=True)``, even if later files already were. ``since`` is the version reached by
    earlier revisions; only ``--sql`` needs it, because there is no database to query.

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
    """Refuse to downgrade, because the tables may hold unhandled events.

    ``op`` is ignored. Alternatively, let ``downgrade`` do nothing: the tables stay, older versions of outboxio refuse
    to run on newer tables, and a later :func:`upgrade` finds them.

    Always raises :class:`ConfigurationError`.

    Example::

        def downgrade() -> None:
            outboxio.downgrade_refused(op)
    """
    raise ConfigurationError(
        "revisions of outboxio's tables cannot be downgraded: the tables may hold events that were not handled yet, "
        "and the data of a dropped column is lost; to go back, restore a backup. To skip this revision, replace "
        "downgrade_refused(op) with pass: the tables stay, and a later upgrade finds them. To discard the events, drop "
        "the tables there with SQL, such as op.execute('DROP SCHEMA eventlog CASCADE')"
    )


class _Upgrade:
    """Applies SQL files on the connection of a revision."""

    def __init__(self, connection: Connection, dialect: str) -> None:
        self._connection = connection
        self._dialect = dialect
        self._catalog = CATALOGS[dialect]

    def run(self, to: int | None) -> None:
        with self._lock():
            found = self._read_schema()
            files = self._files(found, to)
            indexes = indexes_to_create(SHARD, self._dialect, found)
            refuse_external_tables(SHARD, self._dialect, found, indexes)
            has_schema = self._dialect != "sqlite" and inspect(self._connection).has_schema(SCHEMA)
            for statement in remaining_statements(self._dialect, files, found):
                # CREATE SCHEMA needs a database-wide privilege even if the schema exists.
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
            announced = self._catalog.announced_by_older if distinguishes_older(found) else self._catalog.announced
            refuse_older(SHARD, dropping, self._rows(announced))
        return files

    def _read_schema(self) -> Found:
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
    def _lock(self) -> Generator[None]:
        """Hold the migration lock, which ``outbox.migrate()`` also takes. On SQLite, also begin the transaction."""
        if self._dialect == "sqlite":
            # The driver starts a transaction only before an INSERT, so each CREATE would commit separately.
            driver: Any = self._connection.connection.driver_connection
            if not driver.in_transaction:
                self._execute(self._catalog.lock)
            yield
            return
        if self._rows(self._catalog.lock)[0][0] == 0:
            raise DatabaseError(
                "another process has been migrating for a minute; run the upgrade again when it has finished"
            )
        try:
            yield
        finally:
            if self._catalog.unlock:
                self._rows(self._catalog.unlock)

    def _rows(self, query: str) -> list[Any]:
        return list(self._connection.exec_driver_sql(query, execution_options=_NO_PARAMETERS))

    def _execute(self, statement: str) -> None:
        self._connection.exec_driver_sql(statement, execution_options=_NO_PARAMETERS)


def _dialect_of(context: MigrationContext) -> str:
    name = context.dialect.name
    if name not in _DIALECTS:
        raise ConfigurationError(f"outboxio does not support {name}; expected one of {', '.join(_DIALECTS)}")
    return "mariadb" if getattr(context.dialect, "is_mariadb", False) else _DIALECTS[name]


def _newest() -> int:
    """Return the newest version of any dialect: a revision may run on several dialects."""
    return max(sql_files(dialect)[-1].version for dialect in CATALOGS)


def _refuse_unknown(version: Any, parameter: str, *, lowest: int) -> None:
    if version is None and parameter == "to":
        return
    if not isinstance(version, int) or isinstance(version, bool) or not lowest <= version <= _newest():
        raise ConfigurationError(
            f"upgrade({parameter}={briefly(version)}): this version of outboxio has schema versions {lowest} to "
            f"{_newest()}; upgrade outboxio, or correct the number"
        )


def _files_since(dialect: str, since: int, to: int | None) -> list[SqlFile]:
    """Return the files after ``since``, for a database that cannot be queried.

    An older version of outboxio may still run, so after the first revision a contract file is applied only if ``to`` is
    its number. In that case ``since`` may be later than the file.
    """
    files = [file for file in sql_files(dialect) if to is None or file.version <= to]
    if not since:
        return files
    return [file for file in files if (file.version == to if file.is_contract else file.version > since)]


# --- writing a revision --------------------------------------------------------------------------


def configuration(path: str) -> Config:
    """Return the Alembic configuration in a file. Raises :class:`ConfigurationError` if the file does not exist."""
    if not Path(path).is_file():
        raise ConfigurationError(f"Alembic configuration {path!r} not found: pass the file with --config")
    return Config(path, cmd_opts=Namespace(quiet=True))  # the command line reports what was written


def write_revision(
    config: Config,
    *,
    message: str = "outboxio tables",
    revision: str | None = None,
    head: str = "head",
    contract: bool = False,
) -> Path | None:
    """Write a revision that upgrades outboxio's tables to the newest version, and return its file.

    Alembic creates the revision from your template, after ``head``, with the id ``revision`` or a random one. The
    version reached so far is read from the calls of :func:`upgrade` in the existing revisions. Returns ``None`` if
    there is nothing to apply. Contract files are included only with ``contract=True``, except in the first revision.

    Raises :class:`ConfigurationError` with Alembic's reason, such as multiple heads.

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
    """Return the calls of :func:`upgrade` for the next revision. Each contract file gets its own call."""
    called = [to for script in reversed(list(scripts.walk_revisions())) for to in _versions_in(script)]
    since, files = max(called, default=0), {file.version: file for dialect in CATALOGS for file in sql_files(dialect)}
    if not called:
        return [f"outboxio.upgrade(op, to={max(files)})"]
    calls: list[str] = []
    expand = [version for version, file in files.items() if version > since and not file.is_contract]
    if expand:
        calls.append(f"outboxio.upgrade(op, to={max(expand)}, since={since})")
        since = max(expand)
    if contract:  # the first revision applied all files up to its version
        left = [version for version, file in files.items() if file.is_contract and version > called[0]]
        calls += [f"outboxio.upgrade(op, to={version}, since={since})" for version in left if version not in called]
    return calls


def _versions_in(script: Any) -> list[int]:
    """Return the versions in the :func:`upgrade` calls of a revision; none if it does not use outboxio."""
    text = Path(script.path).read_text("utf-8")
    return list(map(int, _CALL.findall(text))) if "outboxio" in text else []
