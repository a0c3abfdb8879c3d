"""Commands to paste: with the outbox that the operator has named, and with quotes where a shell needs quotes."""

from __future__ import annotations

import shlex
from contextvars import ContextVar

from outboxio.support.text import without_passwords

_where: ContextVar[tuple[str, ...]] = ContextVar("where", default=())
_OWN_CODE = "module:outbox"  # in remedies that need the application's code


def remember(target: str | None, database: str | None, namespace: str | None) -> None:
    """Remember the words with which the command line has named the outbox. Further commands need the same words."""
    words = [] if target is None else [without_passwords(target)]
    words += [] if database is None else ["--database", without_passwords(database)]
    words += [] if namespace is None else ["--namespace", namespace]
    _where.set(tuple(words))


def command(name: str, *words: str) -> str:
    """A command for a shell: ``outboxio retry app.main:outbox --handler receipt``."""
    return shlex.join(["outboxio", name, *_where.get(), *words])


def with_outbox(told: str) -> str:
    """A command in words, such as the remedy of a finding, with the words that name the outbox."""
    words = told.split(" ", 2)
    where = _where.get()
    if len(words) < 2 or words[0] != "outboxio" or not where:
        return told
    if _OWN_CODE in told:
        is_code = ":" in where[0] and "://" not in where[0]
        return told.replace(_OWN_CODE, where[0]) if is_code else told
    return " ".join([words[0], words[1], shlex.join(where), *words[2:]])
