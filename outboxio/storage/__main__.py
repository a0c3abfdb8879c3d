"""``python -m outboxio.storage mysql operations``: print the statements of ``storage/tables`` in a dialect.

The parameters are variables of the dialect's shell: ``\\set limit 10`` in psql, ``SET @limit = 10`` in mysql, and
``.parameter set :limit 10`` in sqlite3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules

from outboxio.storage import tables
from outboxio.storage.mysql.flavour import FLAVOURS
from outboxio.storage.statement import Statement, with_placeholders
from outboxio.storage.syntax import MysqlSyntax, PostgresSyntax, SqliteSyntax, Syntax
from outboxio.support.codec import is_object

SYNTAXES: dict[str, tuple[Syntax, Callable[[str], str]]] = {
    "postgres": (PostgresSyntax(), ":'{}'".format),
    **{name: (MysqlSyntax(name, flavour.fragments), "@{}".format) for name, flavour in FLAVOURS.items()},
    "sqlite": (SqliteSyntax(), ":{}".format),
}
LACKING = {"sqlite": {"partitions"}}
"""Modules whose tables a dialect does not have."""


def statements() -> Iterator[tuple[str, str, Statement]]:
    """Yield the module, name and value of each statement."""
    for module in iter_modules(tables.__path__):
        for name, value in vars(import_module(f"{tables.__name__}.{module.name}")).items():
            named: dict[str, object] = {name: value}
            if is_object(value):
                named = {f"{name}[{key}]": each for key, each in value.items()}
            yield from ((module.name, name, each) for name, each in named.items() if isinstance(each, Statement))


def main(arguments: Sequence[str]) -> int:
    """Print the statements of a dialect for all tables or only for the named ones."""
    if not arguments or arguments[0] not in SYNTAXES:
        print(f"usage: python -m outboxio.storage {{{'|'.join(SYNTAXES)}}} [table ...]", file=sys.stderr)
        return 2
    syntax, variable = SYNTAXES[arguments[0]]
    for table, name, statement in statements():
        text = "" if table in LACKING.get(syntax.dialect, ()) else statement.rendered(syntax)
        if text and (table in arguments[1:] or not arguments[1:]):
            print(f"-- {table}.{name}\n{with_placeholders(text, variable)};\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
