"""Due notifications: the statements that read due rows, and the mapping of rows to :class:`Notification`.

All rows of a slot come as a single JSON text with the number of rows, because the driver takes longer for a row than
for all the rest. Two exceptions:

* few rows on MariaDB come as a text each: an aggregate takes a table in a file there, which costs 1.5 ms;
* rows that together exceed ``max_allowed_packet`` come column by column (``FIND_LARGE``).

The text of a row is put together by hand (decision 13), which takes the server half as long as the JSON functions of
the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.notification import NO_CONTEXT, Context, DueQuery, Notification, checked
from outboxio.storage.left_alone import LeftAlone
from outboxio.storage.mysql.columns import (
    BY_DUE,
    BY_ID,
    CONTEXT_COLUMNS,
    CONTEXT_DATES,
    DUE_COLUMNS,
    as_json_value,
    selected,
)

# Joined by UNION ALL, once for each slot: each branch walks the index from the scan position of the slot. The position
# is written with OR, which is two ranges of the index; a comparison of pairs would be none. The rows are not locked:
# this process holds the cluster lock of the slot (decision 2).
_DUE = f"""
FROM {BY_DUE}
WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s AND n.partition_number = %s
  AND (n.next_retry_at = %s AND n.sequence > %s OR n.next_retry_at > %s) AND n.next_retry_at <= %s
ORDER BY n.next_retry_at, n.sequence LIMIT %s
"""
_COLUMNS, _CONTEXT = (", ',', ".join(map(as_json_value, columns)) for columns in (DUE_COLUMNS, CONTEXT_COLUMNS))
DOCUMENT = f"CONCAT('[', {_COLUMNS}, ',[', {_CONTEXT}, ']]')"
AS_ONE = "SELECT COUNT(*), CONCAT('[', GROUP_CONCAT(d.document), ']')"
FIND_FEW = f"(SELECT {DOCUMENT} AS document {_DUE})"
FIND_DUE = f"({AS_ONE} FROM {FIND_FEW} d)"
FIND_LARGE = f"(SELECT {', '.join(map(selected, (*DUE_COLUMNS, *CONTEXT_COLUMNS)))} {_DUE})"

# A process may own 64 partitions of each handler, and the planning of so many of the branches above takes 20 ms. So
# partitions are read with two cheaper statements:
# * All ranges of all slots in a single walk along the index: enough if there are at most FEW_OF_SLOTS rows.
# * Otherwise branches that read only ids, out of the index, and the rows by id: a quarter of the time of the planning.
FEW_OF_SLOTS = 64
_OF_SLOT = """n.handler_name = %s AND n.partition_number = %s
  AND (n.next_retry_at = %s AND n.sequence > %s OR n.next_retry_at > %s) AND n.next_retry_at <= %s"""
FIND_FEW_OF_SLOTS = f"""
SELECT {DOCUMENT} FROM {BY_DUE} WHERE n.namespace = %s AND n.is_unfinished = TRUE AND ({{slots}})
LIMIT {FEW_OF_SLOTS + 1}
"""
_IDS_OF_SLOT = f"(SELECT n.id {_DUE})"
FIND_OF_SLOTS = f"""
SELECT COUNT(*), CONCAT('[', GROUP_CONCAT({DOCUMENT}), ']') FROM ({{slots}}) f STRAIGHT_JOIN {BY_ID} ON n.id = f.id
"""


class _Due(Notification, array_like=True, gc=False):
    """A due row in the form of ``DOCUMENT``."""

    payload: msgspec.Raw
    raw_context: msgspec.Raw


_decode_due = msgspec.json.Decoder(list[_Due]).decode


def few_of_slots(namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> tuple[str, tuple[Any, ...]]:
    """The statement that reads a few due rows of many slots, without the limits of the slots, with the arguments."""
    slots = FIND_FEW_OF_SLOTS.format(slots=" OR ".join([_OF_SLOT] * len(wanted)))
    places = ((w.handler_name, w.partition, *w.after, w.after[0], now) for w in wanted)
    return slots, (namespace, *chain.from_iterable(places))


def of_slots(namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> tuple[str, tuple[Any, ...]]:
    """The statement that reads many due rows of many slots, with the arguments."""
    slots = FIND_OF_SLOTS.format(slots=" UNION ALL ".join([_IDS_OF_SLOT] * len(wanted)))
    return slots, branch_args(namespace, now, wanted)


def branch_args(namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> tuple[Any, ...]:
    """The arguments of a statement with a branch for each slot."""
    args: list[Any] = []
    for w in wanted:
        args += (namespace, w.handler_name, w.partition, w.after[0], w.after[1], w.after[0], now, w.limit)
    return tuple(args)


def first_of_slots(rows: Sequence[Notification], wanted: Sequence[DueQuery]) -> list[Notification]:
    """The rows in order, for each slot up to its limit."""
    room = {(w.handler_name, w.partition): w.limit for w in wanted}
    first: list[Notification] = []
    for row in sorted(rows, key=lambda row: (row.next_retry_us, row.sequence)):
        slot = (row.handler_name, row.partition_number)
        if room[slot]:
            room[slot] -= 1
            first.append(row)
    return first


def as_notifications(found: Sequence[tuple[Any, ...]]) -> list[Notification] | None:
    """The notifications in texts of a row each, or in texts of many rows with the number of rows.

    ``None`` if the server has cut a text off.
    """
    if found and len(found[0]) == 1:
        texts = [text for (text,) in found]
        found = [(len(texts), None if None in texts else f"[{','.join(texts)}]")]
    rows: list[Notification] = []
    for number, text in found:
        if number:
            try:
                decoded = _decode_due(text or "")
            except msgspec.DecodeError:
                return None
            if len(decoded) != number:
                return None
            rows += decoded
    return rows


def from_columns(rows: Iterable[Sequence[Any]], left_alone: LeftAlone) -> list[Notification]:
    """The notifications in rows of ``FIND_LARGE``. A row that cannot be read is left alone, and the rest is read."""
    found: list[Notification] = []
    for row in rows:
        values: dict[str, Any] = dict(zip((*DUE_COLUMNS, *CONTEXT_COLUMNS), row, strict=True))
        context = _context(values)
        due = {column: values[column] for column in DUE_COLUMNS}
        try:
            due["id"] = UUID(due["id"])
        except ValueError:
            left_alone.add(due["id"], due["handler_name"])
        else:
            found.append(checked(Notification(**due, raw_context=context)))
    return found


def _context(values: Mapping[str, Any]) -> Context | bytes:
    """The context in the columns of a row. Only a handler that uses an unreadable context gets an error."""
    read: dict[str, Any] = {column: values[column] for column in CONTEXT_COLUMNS}
    try:
        for column in ("action_params", "headers"):
            read[column] = msgspec.Raw(b"null" if read[column] is None else read[column].encode())
        for column in ("event_id", "action_id", "causation_id"):
            read[column] = None if read[column] is None else UUID(read[column])
    except (ValueError, AttributeError):
        return NO_CONTEXT
    is_whole = all(isinstance(read[column], datetime) for column in CONTEXT_DATES)
    return Context(**read) if is_whole else NO_CONTEXT
