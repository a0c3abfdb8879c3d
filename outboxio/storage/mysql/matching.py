"""The conditions of a search on MySQL and MariaDB.

A statement has only the conditions that a search has, because the server plans each statement anew. All values are
arguments with names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outboxio.model.operating.groups import Search
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.searching.patterns import like, longest_word

# The last error: an array of the type and the message. NULL for errors that are no array.
TOLD = for_flavours(
    """IF(CONVERT(JSON_TYPE(n.errors) USING utf8mb4) COLLATE utf8mb4_bin = 'ARRAY', {last_error}, NULL)"""
)


def _is_text(place: int) -> str:
    return f"CONVERT(JSON_TYPE(JSON_EXTRACT({{told}}, '$[{place}]')) USING utf8mb4) COLLATE utf8mb4_bin = 'STRING'"


def _text(place: int) -> str:
    return f"JSON_UNQUOTE(JSON_EXTRACT({{told}}, '$[{place}]')) COLLATE utf8mb4_bin"


# The condition on what is told. An error that is no object with two texts has no text.
HAS_TEXTS = f"""IF({_is_text(0)} AND {_is_text(1)},
    CONCAT({_text(0)}, ': ', {_text(1)}) LIKE %(error)s ESCAPE '|', FALSE)"""

_EQUAL = ("ordering_key", "model_id", "action_name", "action_id", "correlation_id")


class Conditions:
    """The conditions of a search on a notification ``n``, and the arguments.

    No condition is of use for an index: the walk decides which rows are read. ``of_events``: the conditions on an event
    ``n``, which has no state, no handler and no error. ``of_namespace``: False if an index holds the namespace.
    """

    def __init__(
        self, server: Server, namespace: str, search: Search, *, of_events: bool = False, of_namespace: bool = True
    ) -> None:
        self.args: dict[str, Any] = {"namespace": namespace, "since": search.since, "until": search.until}
        parts = ["n.namespace = %(namespace)s"] if of_namespace else []
        date = "event_date" if of_events else "updated_date"
        if search.states and not of_events:
            parts.append(f"n.state IN ({self.listed('state', map(str, search.states))})")
        if search.names is not None and not of_events:
            parts.append(f"n.handler_name IN ({self.listed('name', search.names)})" if search.names else "FALSE")
        if search.event_types:
            parts.append(f"n.event_type IN ({self.listed('type', search.event_types)})")
        for column in _EQUAL:
            value = getattr(search, column)
            if value is not None:
                parts.append(f"n.{column} = %({column})s")
                self.args[column] = str(value)
        if search.since is not None:
            parts.append(f"n.{date} >= %(since)s")
        if search.until is not None:
            parts.append(f"n.{date} < %(until)s")
        self.text = " AND ".join(parts) or "TRUE"
        """The conditions on columns."""
        self.takes_all = not parts and not search.error
        """True if there is no condition."""
        self.told, self.has_texts = "NULL", "TRUE"
        """What is read of the last error, and the condition on what is told, ``{told}``."""
        if search.error and not of_events:
            # The document is read only if all other conditions hold.
            conditions = " AND ".join([*parts, server.flavour.words["may_have"]])
            self.told, self.has_texts = f"IF({conditions}, {server.spell(TOLD)}, NULL)", HAS_TEXTS
            self.args["error"] = like(search.error)
            self.args |= {"word": longest_word(search.error), "escaped": "\\u00"}

    def put_into(self, statement: str, told: str = "") -> str:
        """A statement with the conditions.

        ``{matches}`` stands for the conditions on columns, ``{told}`` for what is read of the last error, and
        ``{has_texts}`` for the condition on the last error. ``told``: the column of a derived table with ``{told}``.
        """
        has_texts = self.has_texts.replace("{told}", told or self.told)
        statement = statement.replace("{matches}", self.text).replace("{has_texts}", has_texts)
        return statement.replace("{told}", self.told)

    def with_ids(self, statement: str, ids: Iterable[str]) -> str:
        """A statement with the conditions and with ``{ids}``, which become arguments."""
        return self.put_into(statement).replace("{ids}", self.listed("id", ids))

    def listed(self, prefix: str, values: Iterable[str]) -> str:
        """Placeholders for the inside of ``IN (...)``, whose values become arguments."""
        args = {f"{prefix}_{number}": value for number, value in enumerate(values)}
        self.args |= args
        return placeholders(args)


def placeholders(args: Mapping[str, str]) -> str:
    return ", ".join(f"%({name})s" for name in args)
