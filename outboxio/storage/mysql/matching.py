"""The conditions of a search on MySQL and MariaDB.

A statement has only the conditions that a search has, because the server plans each statement anew. All values are
arguments with names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outboxio.model.operating.filter import Search
from outboxio.storage.searching.patterns import like

# The last error in the form of ``Filter.error``; NULL for anything but an object with two texts. The path has a number:
# after an empty array, MariaDB finds nothing at the constant path ``$[last]`` in the rest of the rows.
_TYPE, _MESSAGE = (
    f"JSON_EXTRACT(n.errors, CONCAT('$[', GREATEST(JSON_LENGTH(n.errors), 1) - 1, '].{part}'))"
    for part in ("type", "message")
)
TYPE, MESSAGE = (f"JSON_UNQUOTE({value}) COLLATE utf8mb4_bin" for value in (_TYPE, _MESSAGE))


def _is_of_type(value: str, kind: str) -> str:
    return f"CONVERT(JSON_TYPE({value}) USING utf8mb4) COLLATE utf8mb4_bin = '{kind}'"


HAS_LAST_ERROR = " AND ".join(
    (_is_of_type("n.errors", "ARRAY"), _is_of_type(_TYPE, "STRING"), _is_of_type(_MESSAGE, "STRING"))
)
_ERROR = f"IF({HAS_LAST_ERROR}, CONCAT({TYPE}, ': ', {MESSAGE}) LIKE %(error)s ESCAPE '|', FALSE)"

_EQUAL = ("ordering_key", "model_id", "action_name", "action_id", "correlation_id")


class Conditions:
    """The conditions of a search on a notification ``n``, and the arguments.

    No condition is of use for an index: the walk decides which rows are read. ``of_events``: the conditions on an event
    ``n``, which has no state, no handler and no error.
    """

    def __init__(self, namespace: str, search: Search, *, of_events: bool = False) -> None:
        self.args: dict[str, Any] = {"namespace": namespace, "since": search.since, "until": search.until}
        parts = ["n.namespace = %(namespace)s"]
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
        if search.error and not of_events:
            # The error comes last, because its column may be stored apart from the row.
            parts.append(_ERROR)
            self.args["error"] = like(search.error)
        self.text = " AND ".join(parts)

    def listed(self, prefix: str, values: Iterable[str]) -> str:
        """Placeholders for the inside of ``IN (...)``, whose values become arguments."""
        args = {f"{prefix}_{number}": value for number, value in enumerate(values)}
        self.args |= args
        return placeholders(args)


def placeholders(args: Mapping[str, str]) -> str:
    return ", ".join(f"%({name})s" for name in args)
