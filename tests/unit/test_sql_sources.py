"""Statements are constants: no identifier and no value from data gets into a statement.

The source of ``outboxio/storage`` is walked for everything that puts text together inside a function. Each such place
is listed here with the reason for which it is harmless; a new place fails the test, and so does a listed place that is
gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.kit.sources import PACKAGE, modules, tree_of

STORAGE = PACKAGE / "storage"

#: Functions that make constants: they are called while modules are imported, and never later.
AT_IMPORT = {
    "mysql/columns.py": {"_hash", "notifications_of", "partition_among", "partition_of", "selected", "as_json_value"},
    "mysql/flavour.py": {"by_flavour", "for_flavours", "_spelled"},
    "mysql/ordering.py": {"_find_first", "_first"},
    "postgres/columns.py": {"_context", "_micros", "partition_of", "selected"},
    "postgres/events.py": {"_with_handoff", "_without_handoff"},
    "sqlite/events.py": {"Kind"},
    "sqlite/columns.py": {"due_row", "micros", "names", "values"},
    "transaction_endings.py": {"Lexicon", "_postgres", "_mysql"},
    "statement.py": {"delete"},
    "tables/ordering.py": {"_first_in", "_heads_behind", "_next_in", "_next_key"},
    "tables/probes.py": {"_between", "_newest", "_next_name", "_next_waiting", "_of_state", "_range"},
    "tables/subscriptions.py": {"_next_namespace"},
    "tables/reads.py": {"_count", "_mysql_is_text", "_mysql_text", "_of_listed", "_walk"},
    "tables/notifications.py": {"_records"},
    "syntax.py": {"Syntax", "PostgresSyntax", "MysqlSyntax", "SqliteSyntax"},
}

IDS = "ids of rows: checked to be UUIDs where they come from a caller"
PLACEHOLDERS = "as many placeholders as there are arguments"
SESSION = "our own settings, by names and values of this source, or numbers that the server said"
TEXT = "no statement: what people read"
FOR_PEOPLE = "never run here: a statement of our own files, or a GRANT, that a person is told to run"
NAME = "no statement: a name of this process, or of a file"

#: Where text is put together in a function that runs later, and why no data becomes a part of a statement there.
HARMLESS = {
    "__main__.py": {"main": "printed, never run", "statements": "no statement: the name of a module"},
    "statement.py": {"numbered": "numbers of parameters", "Query._read": "no statement: names of fields"},
    "tables/reads.py": {
        "matching": "constants, in a row",
        "matching_events": "constants, in a row",
        "_joined": "an argument: a pattern",
    },
    "migration.py": {"_flaws": TEXT, "_flaws_of_table": TEXT},
    "__init__.py": {"Shard.__repr__": TEXT, "_plain": "no statement: a URL"},
    "engines/given_engine.py": {"GivenEngine.place": TEXT, "GivenEngine.refusal": TEXT, "given_engine": TEXT},
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
    "postgres/insertion.py": {"blocking_insertion": "no statement: names of arguments, which are numbers"},
    "synchronous.py": {"_mysql_insertion": PLACEHOLDERS, "synchronous": TEXT},
    "mysql/database.py": {
        "identity_of": TEXT,
        "MysqlDatabase._reason": TEXT,
        "MysqlDatabase._give_up": TEXT,
        "MysqlDatabase._session_number": "constants, in a row",
    },
    "mysql/notifications.py": {
        "settlement": IDS,
        "as_notifications": "no statement: an answer",
        "few_of_slots": "one constant, repeated",
        "of_slots": "one constant, repeated",
    },
    "mysql/fanout.py": {
        "MysqlFanout._claim_and_notify": "constants, in a row",
        "MysqlFanout._message": IDS,
        "MysqlFanout._notify": IDS,
        "find_wanted": PLACEHOLDERS,
        "claim_statement": "constants, in a row",
        "_branch": PLACEHOLDERS,
    },
    "mysql/new_notifications.py": {"take_committed": IDS, "find_just_made": IDS + "; and placeholders"},
    "mysql/claim_plan.py": {
        "Key.name": "no statement: a key of fan-out",
        "keys_of": "no statement: a key of fan-out",
        "subscribed": "no statement: an answer",
    },
    "mysql/lock.py": {"MysqlClusterLock.release": PLACEHOLDERS, "_give_back": PLACEHOLDERS},
    "mysql/port.py": {
        "next_values": "variables that are called by numbers",
        "jump_together": "variables that are called by numbers",
        "_assigned": "constants, and variables that are called by numbers",
        "_next": "constants, and variables that are called by numbers",
        "MysqlPort._fetch": "a constant",
        "MysqlPort.named.placeholder": PLACEHOLDERS,
        "MysqlPort.fetch_each.work": "one constant, repeated, and numbers in names of arguments",
    },
    "mysql/schema.py": {
        "MysqlSchema._rights_missing": FOR_PEOPLE,
        "MysqlSchema._refuse_old": TEXT,
        "MysqlSchema._with_indexes": "no statement: lists of columns",
        "_quoted": FOR_PEOPLE,
    },
    "mysql/insertion.py": {
        "_statements": "values that were escaped",
        "_statement": "rows of escaped values",
        "_literals": "values that were escaped",
        "refusal_of": TEXT,
    },
    "mysql/session.py": {
        "_joined": "whole statements, in a row",
        "MysqlSession.claim": IDS,
        "MysqlSession.finish": IDS,
        "MysqlSession.insert_notifications": "constants, in a row",
        "MysqlSession._literal": "bytes, as hexadecimal digits",
        "MysqlSession._run": "the caller's own statement, as its driver would fill it in",
    },
    "connections/health.py": {"Connections.explained": TEXT},
    "mysql/driver.py": {"_own_types": TEXT},
    "mysql/url.py": {"_context_of_engine": TEXT, "url_of": TEXT, "where": TEXT},
    "mysql/values.py": {"_escaping_backslashes": "what escapes", "_doubling_quotes": "what escapes"},
    "postgres/connection.py": {
        "applying": SESSION,
        "quoted": "what escapes: names of locks and of this process",
        "LoopConnection.restore": SESSION,
        "LoopConnection._refused": TEXT,
    },
    "postgres/columns.py": {"encoding_called": "no statement: the name of a codec"},
    "postgres/database.py": {
        "PostgresDatabase.notify": "a channel that is a digest, and a payload that was quoted",
        "PostgresDatabase._explained": TEXT,
        "where": TEXT,
    },
    "postgres/notifications.py": {"settlement": "an argument: slots, as texts"},
    "postgres/schema.py": {
        "PostgresSchema._apply": "a file of our own, or the same without one of its statements",
        "PostgresSchema._refuse_lacking": FOR_PEOPLE,
        "PostgresSchema._cannot_make": FOR_PEOPLE,
    },
    "postgres/resetting.py": {"ResetsItself._end": "constants, in a row"},
    "postgres/errors.py": {"named": "no statement: names of classes"},
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
        "Part.words": TEXT,
        "_parts_in": FOR_PEOPLE,
        "_parts_added": "texts of our files",
        "with_primary_key": "texts of our files",
        "_index": FOR_PEOPLE,
        "_column_again": FOR_PEOPLE,
        "_compact": FOR_PEOPLE,
    },
    "schema.py": {
        "_missing": TEXT,
        "refuse_lacking": FOR_PEOPLE,
        "refuse_older": TEXT,
        "useless_indexes": "no statement: lists of columns",
    },
    "connections/server.py": {"ServerDatabase._watch_over": TEXT},
    "tables/subscriptions.py": {"Subscriptions.job_holders": "no statement: the beginning of the names of leases"},
    "connections/watch.py": {"Watch._not_answered": TEXT, "Watch._end_waiting": TEXT},
    "sqlite/database.py": {"SqliteDatabase.require_own": TEXT},
    "sqlite/events.py": {"Key.name": "no statement: the key of a room"},
    "sqlite/lock.py": {"FileLocks.take": NAME, "_refuse_foreign": TEXT},
    "sqlite/schema.py": {"SqliteSchema._refuse_without_keys": TEXT, "SqliteSchema.orders_refused": TEXT},
    "sqlite/session.py": {"is_connection": NAME},
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for file in modules(STORAGE):
        yield str(file.relative_to(STORAGE)), tree_of(file)


def puts_text_together(node: ast.AST) -> bool:
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
    """The functions in which text is put together, apart from errors that are raised and lines that are logged."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) or (isinstance(child, ast.Call) and is_logged(child.func)):
            continue
        if scope and puts_text_together(child):
            yield ".".join(scope)
        names = (child.name,) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ()
        yield from places(child, (*scope, *names))


def is_logged(function: ast.expr) -> bool:
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id == "logger"


def calls(node: ast.AST, name: str, scope: str = "") -> Iterator[str]:
    """The outermost functions from which a name is called; empty for the module itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == name:
            yield scope
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from calls(child, name, scope or (child.name if is_named else ""))


def test_statements_are_put_together_only_where_no_data_can_become_a_part_of_them() -> None:
    found = {file: set(places(tree)) for file, tree in sources()}

    at_run_time = {
        file: {place for place in some if place.partition(".")[0] not in AT_IMPORT.get(file, ())}
        for file, some in found.items()
    }
    assert {file: some for file, some in at_run_time.items() if some} == {f: set(some) for f, some in HARMLESS.items()}


def test_what_makes_constants_is_called_at_import_only() -> None:
    for file, tree in sources():
        for maker in AT_IMPORT.get(file, ()):
            assert set(calls(tree, maker)) <= {"", *AT_IMPORT[file]}, (file, maker)


def test_a_statement_that_takes_a_name_from_data_would_be_found() -> None:
    for bad in (
        'f"SELECT * FROM {table}"', '"SELECT * FROM %s" % table', '"SELECT * FROM " + table',
        '"SELECT * FROM {}".format(table)', '" ".join(["SELECT * FROM", table])',
        '"SELECT * FROM t".replace("t", table)',
    ):  # fmt: skip
        source = f"class Events:\n    async def find(self, table):\n        await self.fetch({bad})\n"
        assert list(places(ast.parse(source)))[:1] == ["Events.find"], bad
