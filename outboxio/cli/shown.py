"""Values as people read them: states, ages, documents; and rows as machines read them, one JSON object on each line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.text import Text

from outboxio.cli.answer import json_of, line
from outboxio.model.notification import NotificationRecord, State
from outboxio.support.codec import is_list, is_object

COLOURS: Mapping[str, str] = {
    State.DEAD: "bold red",
    State.EXPIRED: "red",
    State.DYING: "red",
    State.FAILED: "yellow",
    State.BLOCKED: "yellow",
    State.SUCCEEDED: "green",
}

_SECOND, _MINUTE, _HOUR, _DAY = 1, 60, 3600, 86400


def state_of(state: str) -> Text:
    """A state, coloured. The word alone says it too."""
    return line((str(state), COLOURS.get(state, "default")))


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment (naive UTC) is: ``14 min``; the empty text for ``None``."""
    if moment is None:
        return ""
    seconds = ((now or datetime.now(UTC).replace(tzinfo=None)) - moment).total_seconds()
    return f"in {span(-seconds)}" if seconds < 0 else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """A duration in its largest unit: ``40 ms``, ``0.4 s``, ``14 min``, ``3 h``, ``2 d``."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit or (unit == _DAY and seconds >= unit):
            return f"{seconds / unit:.0f} {name}"
    if seconds < 0.1 * _SECOND:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 10 * _SECOND else f"{seconds:.1f} s"


def moment(given: datetime | None) -> str:
    """A moment (naive UTC) to the second."""
    return "" if given is None else f"{given:%Y-%m-%d %H:%M:%S}"


def last_error(record: NotificationRecord) -> str:
    """The last error of a notification: ``TypeName: message``, or the empty text.

    A foreign tool may have written errors of a different shape: such errors are shown as they are.
    """
    if not record.errors:
        return ""
    errors: object = record.errors
    last = errors[-1] if is_list(errors) else errors
    if not is_object(last):
        return str(last)
    return f"{last.get('type')}: {last.get('message')}".removesuffix(": ").removesuffix(": None")


def say_lines(values: Iterable[Any]) -> None:
    """One JSON object on each line of stdout (NDJSON), for machines."""
    for value in values:
        sys.stdout.write(f"{json_of(value)}\n")
    sys.stdout.flush()


def shortened(text: str, longest: int = 100) -> str:
    """The beginning of a text, on one line."""
    plain = " ".join(text.split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def duration(given: timedelta) -> str:
    return span(given.total_seconds())
