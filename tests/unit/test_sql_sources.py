"""Statements are constants: no identifier and no value gets into one from data.

The source of ``outboxio/storage`` is walked for everything that puts text together inside a function. Each such place
is listed here with the reason for which it is harmless; one that is new fails the test, and so does one that is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outboxio

STORAGE = Path(outboxio.__file__).parent / "storage"

#: Functions that make constants: they are called while modules are imported, and never later.
AT_IMPORT = {
    "mysql/flavour.py": {"in_both", "_spelled"},
    "mysql/lines.py": {"_find_first"},
    "mysql/notifications.py": {"_as_json", "_object", "_selected"},
    "postgres/events.py": {"_plainly", "_handing_over"},
    "postgres/lines.py": {"_next_key", "_heads_behind"},
    "postgres/notifications.py": {"_context", "_micros", "_selected"},
    "sqlite/events.py": {"Kind"},
    "sqlite/lines.py": {"_head", "_next_key", "_heads_behind"},
    "sqlite/notifications.py": {"_micros", "_object"},
}

IDS = "ids of rows: checked to be UUIDs where they come from a caller"
PLACEHOLDERS = "as many placeholders as there are arguments"
SESSION = "our own settings, by names and values of this source, or numbers that the server said"
TEXT = "no statement: what people read"
NAME = "no statement: a name of this process, or of a file"

#: Where text is put together in a function that runs later, and why no data becomes a part of a statement there.
HARMLESS = {
    "__init__.py": {"Shard.__repr__": TEXT},
    "mysql/connection.py": {
        "Dedicated.fetch_all": "one constant, repeated",
        "Dedicated.in_transaction_of": SESSION,
        "Dedicated._roll_back": SESSION,
        "Dedicated.prepare": SESSION,
        "_set": SESSION,
        "_literal": SESSION,
        "id_list": IDS,
    },
    "mysql/database.py": {"_reason": TEXT},
    "mysql/events.py": {
        "_Key.name": "no statement: the key of a room",
        "MysqlEvents.backfill.write": IDS,
        "MysqlEvents._take.claim_and_notify": "constants, in a row",
        "MysqlEvents._take_committed": IDS,
        "MysqlEvents._take_committed.claim_and_notify": "constants, in a row",
        "MysqlEvents._write": IDS,
        "MysqlEvents._notify": IDS,
        "MysqlEvents._wanted": PLACEHOLDERS,
        "_claim": "constants, in a row",
        "_keys_of": "no statement: the key of a room",
        "_just_made": IDS + "; and placeholders",
        "_subscribed": "no statement: an answer",
        "_branch": PLACEHOLDERS,
    },
    "mysql/lines.py": {
        "MysqlLines._next_keys": "numbers, and variables that are called by numbers",
        "MysqlLines._next_keys.next_key": "numbers, and variables that are called by numbers",
        "MysqlLines._read": IDS,
        "MysqlLines._write": IDS,
    },
    "mysql/lock.py": {"MysqlClusterLock.release": PLACEHOLDERS, "_give_back": PLACEHOLDERS},
    "mysql/notifications.py": {
        "MysqlNotifications.expire": IDS,
        "MysqlNotifications.select_by_id": IDS,
        "MysqlNotifications.replay": "an argument: states, which the caller has checked",
        "MysqlNotifications._write_found": IDS,
        "MysqlNotifications._records": "a constant in a constant",
        "MysqlNotifications._change.lock_and_change": IDS,
        "MysqlNotifications._write": IDS,
        "as_notifications": "no statement: an answer",
    },
    "mysql/retention.py": {"MysqlRetention._parking_nothing": IDS, "MysqlRetention._remove": IDS},
    "mysql/schema.py": {"MysqlSchema._rights_missing": TEXT, "MysqlSchema._refuse_old": TEXT},
    "mysql/session.py": {
        "insertions": "values that were escaped",
        "_spelled": "values that were escaped",
        "_joined": "whole statements, in a row",
        "MysqlSession.claim": IDS,
        "MysqlSession.finish": IDS,
        "MysqlSession.owe": "constants, in a row",
        "MysqlSession.consumed": PLACEHOLDERS,
        "MysqlSession._spelled": "bytes, as hexadecimal digits",
        "MysqlSession._run": "the caller's own statement, as its driver would fill it in",
    },
    "mysql/url.py": {"where": TEXT},
    "mysql/values.py": {"_escaping_backslashes": "what escapes", "_doubling_quotes": "what escapes"},
    "postgres/connection.py": {"Dedicated.prepare": SESSION, "Dedicated.restore": SESSION},
    "postgres/database.py": {
        "PostgresDatabase.notify": "a channel that is a digest, and a payload with its quotes doubled",
        "_where": TEXT,
    },
    "postgres/session.py": {"ActionConnection.execute": "constants, in a row"},
    "mysql/starts.py": {"MysqlStarts._remove": IDS},
    "postgres/lock.py": {
        "_literal": "names of locks and of this process, quoted",
        "PostgresClusterLock.__init__": NAME,
        "PostgresClusterLock.release": "numbers",
    },
    "schema.py": {"refuse_incomplete": TEXT, "missing_parts": TEXT},
    "sqlite/events.py": {"Key.name": "no statement: the key of a room"},
    "sqlite/lock.py": {"FileLocks.take": NAME},
    "sqlite/session.py": {"is_connection": NAME},
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(STORAGE.rglob("*.py")):
        yield str(file.relative_to(STORAGE)), ast.parse(file.read_text("utf-8"))


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
        if isinstance(child, ast.Raise) or (
            isinstance(child, ast.Call) and ast.unparse(child.func).startswith("logger.")
        ):
            continue
        if scope and puts_text_together(child):
            yield ".".join(scope)
        names = (child.name,) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ()
        yield from places(child, (*scope, *names))


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
