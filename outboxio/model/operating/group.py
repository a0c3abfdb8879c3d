"""Groups of failures: the notifications of a handler whose last errors are alike."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from msgspec import Struct

from outboxio.model.operating.filter import Filter

_LONGEST = 200  # characters of a message that tell two errors apart

#: The parts of a message that differ between errors of the same cause.
_VARYING = re.compile(
    r"""
      [0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}   # a UUID
    | \b0[xX][0-9a-fA-F]+                                     # an address
    | (?<![A-Za-z0-9_])(?:'[^'\n]*'|"[^"\n]*"|`[^`\n]*`)       # a quoted value, and no apostrophe
    | \b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b                # a hash or an id
    | \d+
    """,
    re.VERBOSE,
)
#: The same for a message without a UUID, a hash and an id. A pattern that begins with a set of characters is fast.
_VARYING_SHORT = re.compile(
    r"""
    [\d'"`](?:
      (?<=\b0)[xX][0-9a-fA-F]+
    | (?<=\d)\d*
    | (?<=')(?<![A-Za-z0-9_]')[^'\n]*'
    | (?<=")(?<![A-Za-z0-9_]")[^"\n]*"
    | (?<=`)(?<![A-Za-z0-9_]`)[^`\n]*`
    )
    """,
    re.VERBOSE,
)
_LONG = re.compile(r"[0-9a-fA-F][0-9a-fA-F]{7}")  # a part of each UUID, hash and id
_LINES = re.compile(r"\s*[\r\n]\s*")  # so that a fingerprint is a single line
_SEVERAL = re.compile(r"\*(?:[\s.,:+-]*\*)+")


def fingerprint(type: str, message: str) -> str:
    """The text that all errors of a group share, in the form ``TypeName: message`` with ``*`` for what differs.

    ``Filter(error=fingerprint(...))`` matches the error.

    Example::

        fingerprint("KeyError", "'ada'")  # "KeyError: *"
        fingerprint("ConnectionError", "pdf:8080 refused attempt 3")  # "ConnectionError: pdf:* refused attempt *"
    """
    message = message.rstrip()
    shared = message[:_LONGEST]
    shared = (_VARYING if _LONG.search(shared) else _VARYING_SHORT).sub("*", shared)
    if "\n" in shared or "\r" in shared:
        shared = _LINES.sub("*", shared)
    if len(message) > _LONGEST:  # the cut may have parted a value
        shared = shared.rsplit(maxsplit=1)[0] + "*" if " " in shared else shared + "*"
    return _SEVERAL.sub("*", f"{type}: {shared}").rstrip()


class Group(Struct, frozen=True, kw_only=True):
    """The notifications of a handler whose last errors have the same fingerprint. Dates are naive UTC.

    Example::

        for group in await outbox.admin.groups():
            print(group.number, group.handler_name, group.fingerprint)
            await outbox.admin.retry(group.filter, reason="the PDF service is back")
    """

    handler_name: str
    """The stored name of the handler."""
    fingerprint: str
    """The error, with ``*`` for numbers, ids and quoted values."""
    number: int
    """The notifications among those that were looked at."""
    first_seen: datetime
    """The last change of the oldest notification."""
    last_seen: datetime
    sample: str
    """The last error of the newest notification, in the form ``TypeName: message``."""
    notification_id: UUID
    """The newest notification."""
    event_id: UUID
    filter: Filter
    """Selects the notifications of the group, also those that were not looked at."""
    shard: str


T = TypeVar("T")


class Groups(list[T]):
    """The groups, the largest first, and how many notifications were looked at.

    ``str`` says the scope: ``grouped over the newest 500 of 4,310``.
    """

    def __init__(self, groups: Iterable[T], looked_at: int, of: int) -> None:
        """``looked_at``: the notifications that were grouped. ``of``: a bounded count of all that match."""
        super().__init__(groups)
        self.looked_at = looked_at
        self.of = of

    def __str__(self) -> str:
        if self.looked_at >= self.of:
            return f"grouped over all {self.looked_at:,}"
        return f"grouped over the newest {self.looked_at:,} of {self.of}"
