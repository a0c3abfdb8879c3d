"""SQL statements are constants: neither identifiers nor values from data become a part of a statement.

The test searches the source of ``outboxio/storage`` for functions that build text. Each of them is listed here with the
reason why it is safe. A new function fails the test, and so does a listed function that no longer builds text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.kit.sources import PACKAGE, modules, tree_of

STORAGE = PACKAGE / "storage"

#: Functions that build constants: they are only called while modules are imported.
AT_IMPORT = {
    "mysql/columns.py": {"_hash", "notifications_of", "partition_among", "partition_of", "selected", "as_json_value"},
    "mysql/flavour.py": {"by_flavour", "for_flavours", "_expanded"},
    "mysql/ordering.py": {"_find_first", "_first"},
    "postgres/columns.py": {"_context", "_micros", "partition_of", "selected"},
    "postgres/events.py": {"_with_handoff", "_without_handoff"},
    "sqlite/events.py": {"Kind"},
    "sqlite/columns.py": {"due_row", "micros", "names", "values"},
    "transaction_endings.py": {"Lexicon", "_postgres", "_mysql"},
    "statement.py": {"delete"},
    "tables/ordering.py": {"_first_in", "_heads_after", "_next_in", "_next_key"},
    "tables/probes.py": {"_between", "_newest", "_next_name", "_next_waiting", "_of_state", "_range"},
    "tables/subscriptions.py": {"_next_namespace"},
    "tables/reads.py": {"_count", "_mysql_is_text", "_mysql_text", "_of_listed", "_scan"},
    "tables/notifications.py": {"_records"},
    "syntax.py": {"Syntax", "PostgresSyntax", "MysqlSyntax", "SqliteSyntax"},
}

IDS = "ids of rows: checked to be UUIDs where they come from a caller"
PLACEHOLDERS = "as many placeholders as there are arguments"
SESSION = "session settings: names and values from this source, or numbers from the server"
TEXT = "not a statement: text for people"
FOR_PEOPLE = "not run: a statement from the SQL files, or a GRANT, for a person to run"
NAME = "not a statement: a name of this process, or of a file"

#: Functions that build text at run time, and why no data becomes a part of a statement there.
HARMLESS = {
    "__main__.py": {"main": "printed, never run", "statements": "not a statement: the name of a module"},
    "statement.py": {"numbered": "numbers of parameters", "Query._read": "not a statement: names of fields"},
    "tables/reads.py": {
        "matching": "joined constants",
        "matching_events": "joined constants",
        "_joined": "an argument: a pattern",
    },
    "migration.py": {"_flaws": TEXT, "_flaws_of_table": TEXT},
    "__init__.py": {"Shard.__repr__": TEXT, "_plain": "not a statement: a URL"},
    "engines/user_engine.py": {"UserEngine.address": TEXT, "UserEngine.refusal": TEXT, "user_engine": TEXT},
    "mysql/connection.py": {
        "LoopConnection.fetch_all": "one constant, repeated",
        "LoopConnection.transaction": SESSION,
        "LoopConnection._roll_back": SESSION,
        "LoopConnection.prepare": SESSION,
        "_set": SESSION,
        "_literal": SESSION,
        "id_list": IDS,
    },
    "postgres/server_info.py": {"identity_of": TEXT},
    "postgres/insertion.py": {"blocking_insertion": "not a statement: names of arguments, which are numbers"},
    "synchronous.py": {"_mysql_insertion": PLACEHOLDERS, "synchronous": TEXT},
    "mysql/database.py": {
        "identity_of": TEXT,
        "MysqlDatabase._reason": TEXT,
        "MysqlDatabase._on_timeout": TEXT,
        "MysqlDatabase._session_number": "joined constants",
    },
    "mysql/notifications.py": {
        "settlement": IDS,
        "as_notifications": "not a statement: a result",
        "few_of_slots": "one constant, repeated",
        "of_slots": "one constant, repeated",
    },
    "mysql/fanout.py": {
        "MysqlFanout._claim_and_notify": "joined constants",
        "MysqlFanout._message": IDS,
        "MysqlFanout._notify": IDS,
        "find_undelivered_keys": PLACEHOLDERS,
        "claim_statement": "joined constants",
        "_branch": PLACEHOLDERS,
    },
    "mysql/new_notifications.py": {"take_committed": IDS, "find_just_made": IDS + "; and placeholders"},
    "mysql/claim_plan.py": {
        "Key.name": "not a statement: a key of fan-out",
        "keys_of": "not a statement: a key of fan-out",
        "subscribed": "not a statement: a result",
    },
    "mysql/lock.py": {"MysqlClusterLock.release": PLACEHOLDERS, "_release": PLACEHOLDERS},
    "mysql/port.py": {
        "next_values": "numbered variables",
        "jump_together": "numbered variables",
        "_assigned": "constants, and numbered variables",
        "_next": "constants, and numbered variables",
        "MysqlPort._fetch": "a constant",
        "MysqlPort.named.placeholder": PLACEHOLDERS,
        "MysqlPort.fetch_each.work": "one constant, repeated, and numbers in names of arguments",
    },
    "mysql/schema.py": {
        "MysqlSchema._rights_missing": FOR_PEOPLE,
        "MysqlSchema._refuse_old": TEXT,
        "MysqlSchema._with_indexes": "not a statement: lists of columns",
        "_quoted": FOR_PEOPLE,
    },
    "mysql/insertion.py": {
        "_statements": "values that were escaped",
        "_statement": "rows of escaped values",
        "_literals": "values that were escaped",
        "refusal_of": TEXT,
    },
    "mysql/session.py": {
        "_joined": "joined statements",
        "MysqlSession.claim": IDS,
        "MysqlSession.finish": IDS,
        "MysqlSession.insert_notifications": "joined constants",
        "MysqlSession._literal": "bytes, as hexadecimal digits",
        "MysqlSession._run": "the caller's own statement, as its driver would fill it in",
    },
    "connections/health.py": {"ServerConnections.explained": TEXT},
    "mysql/driver.py": {"_own_types": TEXT},
    "mysql/url.py": {"_context_of_engine": TEXT, "url_of": TEXT, "where": TEXT},
    "mysql/values.py": {"_escaping_backslashes": "what escapes", "_doubling_quotes": "what escapes"},
    "postgres/connection.py": {
        "applying": SESSION,
        "quoted": "what escapes: names of locks and of this process",
        "LoopConnection.restore": SESSION,
        "LoopConnection._refused": TEXT,
    },
    "postgres/columns.py": {"encoding_called": "not a statement: the name of a codec"},
    "postgres/database.py": {
        "PostgresDatabase.notify": "a channel that is a digest, and a payload that was quoted",
        "PostgresDatabase._translated": TEXT,
        "where": TEXT,
    },
    "postgres/notifications.py": {"settlement": "an argument: slots, as texts"},
    "postgres/schema.py": {
        "PostgresSchema._apply": "a file of our own, or the same without one of its statements",
        "PostgresSchema._refuse_lacking": FOR_PEOPLE,
        "PostgresSchema._cannot_make": FOR_PEOPLE,
    },
    "postgres/resetting.py": {"ResettingConnection._end": "joined constants"},
    "postgres/errors.py": {"named": "not a statement: names of classes"},
    "postgres/psycopg_adapter.py": {
        "PsycopgConnection.add_listener": "a channel that is a digest",
        "PsycopgConnection.remove_listener": "a channel that is a digest",
    },
    "postgres/psycopg_values.py": {
        "_quoted": "an argument: an array",
        "argument": "an argument: an array",
        "Row.__repr__": TEXT,
    },
    "postgres/lock.py": {
        "PostgresKeySession.take": "numbers of locks, in place of parameters: one message to the server",
        "PostgresKeySession.leave": "a number of a lock, in place of a parameter: one message to the server",
        "PostgresClusterLock.__init__": NAME,
        "PostgresClusterLock.release": "numbers, and names that were quoted",
    },
    "ddl.py": {
        "Part.description": TEXT,
        "_parts_in": FOR_PEOPLE,
        "_parts_added": "texts of our files",
        "with_primary_key": "texts of our files",
        "_index": FOR_PEOPLE,
        "_column_again": FOR_PEOPLE,
        "_compact": FOR_PEOPLE,
    },
    "schema.py": {
        "_missing": TEXT,
        "require_rights": FOR_PEOPLE,
        "refuse_older": TEXT,
        "mismatched_indexes": "not a statement: lists of columns",
    },
    "connections/server.py": {"ServerDatabase._watch_over": TEXT},
    "tables/subscriptions.py": {"Subscriptions.job_holders": "not a statement: the beginning of the names of leases"},
    "connections/watch.py": {"Watch._timed_out": TEXT, "Watch._end_waiting": TEXT},
    "sqlite/database.py": {"SqliteDatabase.require_same_database": TEXT},
    "sqlite/events.py": {"Key.name": "not a statement: a key of fan-out"},
    "sqlite/lock.py": {"FileLocks.take": NAME, "_require_trusted_owner": TEXT},
    "sqlite/schema.py": {"SqliteSchema._refuse_without_keys": TEXT, "SqliteSchema.operations_unavailable": TEXT},
    "sqlite/session.py": {"is_connection": NAME},
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for file in modules(STORAGE):
        yield str(file.relative_to(STORAGE)), tree_of(file)


def builds_text(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(part, ast.FormattedValue) for part in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("format", "format_map", "replace", "join", "substitute")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return any(is_text(side) for side in (node.left, node.right))
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def places(node: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the functions that build text, except for raised errors and log messages."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) or (isinstance(child, ast.Call) and is_logged(child.func)):
            continue
        if scope and builds_text(child):
            yield ".".join(scope)
        names = (child.name,) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ()
        yield from places(child, (*scope, *names))


def is_logged(function: ast.expr) -> bool:
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id == "logger"


def calls(node: ast.AST, name: str, scope: str = "") -> Iterator[str]:
    """Yield the outermost functions that call a name; an empty text for the module itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == name:
            yield scope
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from calls(child, name, scope or (child.name if is_named else ""))


def test_data_never_becomes_part_of_a_statement() -> None:
    found = {file: set(places(tree)) for file, tree in sources()}

    at_run_time = {
        file: {place for place in some if place.partition(".")[0] not in AT_IMPORT.get(file, ())}
        for file, some in found.items()
    }
    assert {file: some for file, some in at_run_time.items() if some} == {f: set(some) for f, some in HARMLESS.items()}


def test_constants_are_only_built_at_import() -> None:
    for file, tree in sources():
        for maker in AT_IMPORT.get(file, ()):
            assert set(calls(tree, maker)) <= {"", *AT_IMPORT[file]}, (file, maker)


def test_a_statement_built_from_data_is_detected() -> None:
    for bad in (
        'f"SELECT * FROM {table}"', '"SELECT * FROM %s" % table', '"SELECT * FROM " + table',
        '"SELECT * FROM {}".format(table)', '" ".join(["SELECT * FROM", table])',
        '"SELECT * FROM t".replace("t", table)',
    ):  # fmt: skip
        source = f"class Events:\n    async def find(self, table):\n        await self.fetch({bad})\n"
        assert list(places(ast.parse(source)))[:1] == ["Events.find"], bad
