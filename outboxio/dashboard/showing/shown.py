"""Values as people read them: the filters of the templates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
from markupsafe import Markup, escape
from msgspec import Raw, Struct

from outboxio.health.values import MOST, counted, spoken
from outboxio.model.operating.operation import WORST_FIRST as worst_first
from outboxio.model.operating.operation import BoundedCount
from outboxio.support.clock import utc_now

NOTHING = "\N{EN DASH}"
"""Stands for a value that does not exist."""

_QUOTED = re.compile(r"`([^`]+)`")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")


#: Characters without a shape of their own: controls but tab and line ends, lone surrogates, and characters that change
#: the direction of the text around.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(value: Any) -> Any:
    """A value for a page. Characters without a shape, which can make a text look like another, are escaped.

    Each ``{{ }}`` of a template passes through this function. Text that is escaped already is unchanged: a template
    writes ``{{ value|e }}`` where a form has to send the exact text back.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)


def number(value: float | None) -> str:
    """A number: ``8,211``, ``0.4``."""
    if value is None:
        return NOTHING
    is_small = not isinstance(value, int) and 0 < abs(value) < 10
    return f"{value:,.1f}" if is_small else f"{value:,.0f}"


def bounded(value: int | None, most: int = MOST) -> str:
    """A number that was counted up to a bound: ``10,000+``. A ``BoundedCount`` knows whether the number is complete."""
    if value is None:
        return NOTHING
    is_complete = getattr(value, "is_complete", None)
    if is_complete is not None:
        return f"{int(value):,}" if is_complete else f"{int(value):,}+"
    return counted(value, most)


def duration(seconds: float | None) -> str:
    """A duration in its largest unit: ``0.4 s``, ``14 min``; below a second in milliseconds."""
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 0.1 else spoken(seconds)


def bound(seconds: float | None) -> str:
    """The upper bound of a bucket of durations, exact: ``2.5 ms``, ``0.25 s``. Infinity is more than any bound."""
    if seconds is None:
        return NOTHING
    if math.isinf(seconds):
        return "off the scale"
    return f"{seconds * 1000:g} ms" if seconds < 0.1 else f"{seconds:g} s" if seconds < 60 else spoken(seconds)


def offset(seconds: float) -> str:
    """How far a clock is ahead (``+1.5 s``) or behind (``-1.5 s``)."""
    return "0.0 s" if abs(seconds) < 0.05 else f"{seconds:+.1f} s"


def share(value: float | None) -> str:
    """A share from 0 to 1 in per cent. A share that is not 0 is never shown as 0."""
    if value is None:
        return NOTHING
    return "< 1 %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def moment(value: datetime | None) -> str:
    """A moment in UTC, to the second."""
    return NOTHING if value is None else f"{value:%Y-%m-%d %H:%M:%S}"


def iso(value: datetime) -> str:
    """A moment for ``<time datetime>``."""
    return f"{value:%Y-%m-%dT%H:%M:%S}Z"


def ago(value: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment is: ``14 min ago``, ``in 30 s``. ``now``: naive UTC, by default of this machine."""
    if value is None:
        return NOTHING
    seconds = ((now or utc_now()) - value).total_seconds()
    if abs(seconds) < 1:
        return "now"
    told = f"{abs(seconds):.0f} s" if abs(seconds) < 10 else spoken(abs(seconds))
    return f"in {told}" if seconds < 0 else f"{told} ago"


def sentence(text: str) -> Markup:
    """A sentence of a verdict. Names between backticks become ``<code>``."""
    text, end = str(visible(text)), 0
    parts: list[str] = []
    for found in _QUOTED.finditer(text):
        parts += [escape(text[end : found.start()]), Markup("<code>"), escape(found[1]), Markup("</code>")]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def process(name: str) -> str:
    """The name of a process as people tell processes apart: machine and process id, without the random part."""
    return name.rpartition(":")[0] or name


def shortened(text: object, most: int = 120) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def short_id(text: object) -> str:
    """An id in a table. A UUID is cut to its end, because UUIDs of the same time begin alike."""
    return f"\N{HORIZONTAL ELLIPSIS}{str(text)[-8:]}" if is_uuid(text) else shortened(text, 40)


def is_uuid(text: object) -> bool:
    """True for the usual form of a UUID, with hyphens."""
    return _UUID.fullmatch(str(text)) is not None


_FILTERS: Sequence[Callable[..., Any]] = (
    number, bounded, duration, bound, offset, share, moment, iso, ago, sentence, process, shortened, short_id,
)  # fmt: skip
FILTERS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _FILTERS}


TESTS: Mapping[str, Any] = {"is_uuid": is_uuid}


# --- the words of the dashboard -------------------------------------------------------------------
#
# The words of the dashboard, each with one or two sentences: column heads and the glossary show the sentences.


STATES: Mapping[str, str] = {
    "PENDING": "The notification waits for its handler.",
    "FAILED": "The handler has failed, and will be retried at the due date. Nobody needs to do anything yet.",
    "BLOCKED": "An earlier notification with the same ordering key is not finished; this notification waits behind it.",
    "DYING": "The notification has failed permanently, and its on_dead hook has still to run.",
    "SUCCEEDED": "The handler has handled the event.",
    "EXPIRED": "The notification has outlived its retention window without success. Retry or skip it.",
    "DEAD": "The notification has failed permanently: no further retry, until somebody retries or skips it.",
    "SKIPPED": "Somebody has skipped the notification: the handler never handles this event.",
}
"""The states of a notification."""

UNCOUNTED = frozenset({
    "pause", "unpause", "stop", "unsubscribe", "partitions", "pause_job", "unpause_job", "run_job_now", "remove_job",
})  # fmt: skip
"""Orders that change no notification."""

OPERATIONS: Mapping[str, str] = {
    "RUNNING": "The order is being carried out.",
    "DONE": "The order has been carried out.",
    "STOPPED": "Somebody has stopped the order. The part that was done stays done.",
    "FAILED": "The order has ended with an error. The part that was done stays done.",
}
"""The states of an operation."""

JOBS: Mapping[str, tuple[str, str]] = {
    "WAITING": ("wait", "The job waits for its next moment."),
    "RUNNING": ("wait", "A process runs the job."),
    "RETRYING": ("warn", "The last attempt has failed, and the job waits for the next attempt."),
    "PAUSED": ("off", "No run starts until somebody unpauses the job."),
    "SUCCEEDED": ("good", "The last run has succeeded."),
    "FAILED": ("bad", "The last run has raised an error."),
    "TIMED_OUT": ("bad", "The last run took longer than its timeout."),
    "INTERRUPTED": ("bad", "The process ended, or left running(), during the last run."),
}
"""The states of a job and the results of its last run: the look, and the meaning."""

MARKS: Mapping[str, str] = {
    "PENDING": "wait", "FAILED": "warn", "BLOCKED": "wait", "DYING": "bad", "SUCCEEDED": "good", "EXPIRED": "bad",
    "DEAD": "bad", "SKIPPED": "off", "RUNNING": "wait", "DONE": "good", "STOPPED": "off", "ok": "good",
    "degraded": "warn", "down": "bad",
}  # fmt: skip
"""How a state looks: the class of its label."""

REASONS: Mapping[str, str] = {
    "queued": "queued", "retry": "wait for a retry", "delayed": "delayed", "schedule": "wait for the schedule",
    "batch": "wait for a full batch", "blocked": "behind others", "version": "need newer code",
    "no_handler": "without a handler", "no_owner": "without a process", "paused": "paused",
    "unavailable": "wait for a service", "rate": "held back by the rate", "concurrency": "wait for a free run",
}  # fmt: skip
"""Why notifications have not run (``admin.waiting()``), after their number."""

NEEDS_HELP = ("version", "no_handler", "no_owner")
"""The reasons that do not end by themselves."""

WORST_FIRST: Sequence[str] = [str(state) for state in worst_first]
"""The states of a notification, the worst first."""

SIGNS: Mapping[str, str] = {"good": "✓", "warn": "▲", "bad": "✕", "wait": "◔", "off": "○"}
"""The sign of each look, because colour alone does not say enough."""

TERMS: Mapping[str, str] = {
    "event": "A fact that an action has recorded, in the same transaction as the rows of the application.",
    "action": "A unit of work of the application: one transaction, with all of its events.",
    "notification": "One event for one handler. A handler's work is a list of notifications.",
    "handler": "A function of the application that reacts to events. Its name is stored in each notification.",
    "fan-out": "The step that turns each new event into one notification for each handler.",
    "waiting for fan-out": "Events that have no notifications yet. A healthy system fans an event out within a second.",
    "due": "Notifications that a handler should handle now.",
    "oldest due": "How long the first due notification has waited. A healthy handler keeps this short.",
    "due later": "Notifications that are delayed, scheduled, or before their retry.",
    "reason": "Why unfinished notifications have not run. Each has exactly one reason.",
    "blocked": "Notifications behind an unfinished notification with the same ordering key.",
    "dead letters": "DEAD and EXPIRED notifications: nothing happens to them until somebody retries or skips them.",
    "parked key": "An ordering key whose first unfinished notification stands behind a dead letter. "
    "Nothing of the key runs until somebody retries the dead letter or resumes the key.",
    "ordering key": "Notifications of an ordered handler with the same key run one after the other.",
    "fail share": "The share of runs that failed within the last 5 minutes.",
    "succeeded": "Notifications that were handled, for each of the last 60 minutes.",
    "duration": "How long a run takes: half of the runs of the last hour were faster than p50, 95 % than p95.",
    "lag": "How long notifications wait between their due date and the start of the handler.",
    "in flight": "Runs under way now, and how many all processes together allow.",
    "holder": "The process that runs the handler. At any time, one process holds a handler or a partition.",
    "lock": "The right to run a handler, a partition or fan-out. One process holds each lock.",
    "partition": "A part of a handler that a process of its own can hold.",
    "instance": "A process that runs fan-out or handlers, by its own report.",
    "loop lag": "How late the event loop of the process is. Above 0.1 s, a handler blocks the process.",
    "stuck": "Runs that ignore their cancellation after the handler's timeout.",
    "paused": "Nobody runs the handler until somebody unpauses it. Its notifications wait.",
    "unroutable": "Notifications for a handler, or for a version of their event, that no process has.",
    "shard": "One of several databases of the outbox.",
    "clock offset": "How far the clock of a machine is ahead of the clock of the database.",
    "operation": "An order of an operator, with its progress: who ordered what, and why.",
    "attempts": "How often the handler has run for this notification.",
    "job": "A function of the application that runs at set moments, once in the cluster for each moment.",
    "next moment": "The next moment of the schedule of a job.",
    "missed": "Moments of a job that passed without a run: no process ran, or a run took too long.",
    "correlation": "An id that all events of one request share.",
    "causation": "The event whose handler recorded this event.",
    "sentinel": "The row of an action without events, which proves that the action has run.",
    "hops": "The number of events before this event in a chain of causes.",
}
"""All other words, in the order of the glossary."""


def explained(term: str) -> str:
    """The sentence for a term or a state; the empty text for an unknown word."""
    return TERMS.get(term) or STATES.get(term, "")


# --- facts as JSON --------------------------------------------------------------------------------
#
# Facts as JSON: the same facts as on the page, with exact numbers, and with moments in UTC.


def as_json(facts: object) -> bytes:
    """The facts as indented JSON.

    - A moment is ISO 8601 in UTC: ``2026-01-31T02:41:00Z``. A duration is seconds.
    - A number has all of its digits, also within a document of an event.
    - A bounded count is an object with ``number`` and ``is_complete``.
    - A lone surrogate, which JSON in UTF-8 cannot have, becomes its escape as text.
    - A struct has all of its fields, or those that its class names in ``in_json``.
    """
    return msgspec.json.format(msgspec.json.encode(_plain(facts)), indent=2) + b"\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | Raw):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, BoundedCount):
        return {"number": int(value), "is_complete": value.is_complete}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Struct):
        return {name: _plain(getattr(value, name)) for name in getattr(value, "in_json", value.__struct_fields__)}
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        return {_plain(str(key)): _plain(each) for key, each in fields.items()}
    if isinstance(value, Iterable):
        return [_plain(each) for each in cast("Iterable[object]", value)]
    return value
