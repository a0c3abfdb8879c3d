"""The statements of ``storage/tables`` as a dialect receives them, for tests of plans."""

from __future__ import annotations

from outboxio.storage.statement import Statement, numbered
from outboxio.storage.syntax import PostgresSyntax, SqliteSyntax

_POSTGRES, _SQLITE = PostgresSyntax(), SqliteSyntax()


def on_postgres(statement: Statement) -> str:
    """With ``$1``, ``$2`` for the parameters in the order in which they occur."""
    return numbered(statement.rendered(_POSTGRES))[0]


def on_sqlite(statement: Statement) -> str:
    return statement.rendered(_SQLITE)
