"""Format values for display: the filters of the templates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
from markupsafe import Markup, escape
from msgspec import Raw, Struct

from outboxio.health.values import MOST, counted, human_duration
from outboxio.model.operating.operation import WORST_FIRST as worst_first
from outboxio.model.operating.operation import BoundedCount
from outboxio.support.clock import utc_now

NOTHING = "\N{EN DASH}"
"""Stands for a value that does not exist."""

_QUOTED = re.compile(r"`([^`]+)`")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")


#: Invisible characters: controls except tab and line ends, lone surrogates, and characters that change the direction of
#: the surrounding text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(value: Any) -> Any:
    """Return a value for a page, with invisible characters escaped, because they can make one text look like another.

    Each ``{{ }}`` in a template passes through this function. Text that is already escaped is unchanged: a template
    uses ``{{ value|e }}`` where a form has to send the exact text back.
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
    """Format a number that was counted up to a bound: ``10,000+``. A ``BoundedCount`` says whether it is complete."""
    if value is None:
        return NOTHING
    is_complete = getattr(value, "is_complete", None)
    if is_complete is not None:
        return f"{int(value):,}" if is_complete else f"{int(value):,}+"
    return counted(value, most)


def duration(seconds: float | None) -> str:
    """Format a duration in its largest unit: ``0.4 s``, ``14 min``; below a second in milliseconds."""
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 0.1 else human_duration(seconds)


def bound(seconds: float | None) -> str:
    """Format the upper bound of a bucket of durations exactly: ``2.5 ms``, ``0.25 s``, or ``off the scale``."""
    if seconds is None:
        return NOTHING
    if math.isinf(seconds):
        return "off the scale"
    return f"{seconds * 1000:g} ms" if seconds < 0.1 else f"{seconds:g} s" if seconds < 60 else human_duration(seconds)


def offset(seconds: float) -> str:
    """Format how far a clock is ahead (``+1.5 s``) or behind (``-1.5 s``)."""
    return "0.0 s" if abs(seconds) < 0.05 else f"{seconds:+.1f} s"


def share(value: float | None) -> str:
    """Format a share from 0 to 1 as a percentage. A share above 0 is never shown as 0."""
    if value is None:
        return NOTHING
    return "< 1 %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def timestamp(value: datetime | None) -> str:
    """Format a time in UTC, to the second."""
    return NOTHING if value is None else f"{value:%Y-%m-%d %H:%M:%S}"


def iso(value: datetime) -> str:
    """Format a time for ``<time datetime>``."""
    return f"{value:%Y-%m-%dT%H:%M:%S}Z"


def ago(value: datetime | None, now: datetime | None = None) -> str:
    """Format how long ago a time is: ``14 min ago``, ``in 30 s``. ``now``: naive UTC; default: this machine's time."""
    if value is None:
        return NOTHING
    seconds = ((now or utc_now()) - value).total_seconds()
    if abs(seconds) < 1:
        return "now"
    text = f"{abs(seconds):.0f} s" if abs(seconds) < 10 else human_duration(abs(seconds))
    return f"in {text}" if seconds < 0 else f"{text} ago"


def sentence(text: str) -> Markup:
    """Return the text of a finding or reason as HTML. Names between backticks become ``<code>``."""
    text, end = str(visible(text)), 0
    parts: list[str] = []
    for found in _QUOTED.finditer(text):
        parts += [escape(text[end : found.start()]), Markup("<code>"), escape(found[1]), Markup("</code>")]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def process(name: str) -> str:
    """Return the name of a process for display: host and process id, without the random part."""
    return name.rpartition(":")[0] or name


def shortened(text: object, most: int = 120) -> str:
    """Return the start of a text, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def short_id(text: object) -> str:
    """Return an id for a table. A UUID is shortened to its end, because UUIDs of the same time start alike."""
    return f"\N{HORIZONTAL ELLIPSIS}{str(text)[-8:]}" if is_uuid(text) else shortened(text, 40)


def is_uuid(text: object) -> bool:
    """True for a UUID in its usual form, with hyphens."""
    return _UUID.fullmatch(str(text)) is not None


_FILTERS: Sequence[Callable[..., Any]] = (
    number, bounded, duration, bound, offset, share, timestamp, iso, ago, sentence, process, shortened, short_id,
)  # fmt: skip
FILTERS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _FILTERS}


TESTS: Mapping[str, Any] = {"is_uuid": is_uuid}


# --- terms, with the explanations shown in column headers and in the glossary ----------------------


STATES: Mapping[str, str] = {
    "PENDING": "Waits for its handler.",
    "FAILED": "The last attempt failed. The handler is retried when the notification is due; no action is needed yet.",
    "BLOCKED": "Waits for an earlier notification with the same ordering key to finish.",
    "DYING": "Failed permanently; the on_dead hook has not run yet.",
    "SUCCEEDED": "The handler has handled the event.",
    "EXPIRED": "Did not succeed within its retention window. Retry or skip it.",
    "DEAD": "Failed permanently. There are no further attempts until someone retries or skips it.",
    "SKIPPED": "Skipped by an operator or a handler; it will not be handled.",
}
"""The states of a notification."""

UNCOUNTED = frozenset({
    "pause", "unpause", "stop", "unsubscribe", "partitions", "pause_job", "unpause_job", "run_job_now", "remove_job",
})  # fmt: skip
"""Operations that change no notifications."""

OPERATIONS: Mapping[str, str] = {
    "RUNNING": "In progress.",
    "DONE": "Completed.",
    "STOPPED": "Stopped by an operator. Changes already made stay.",
    "FAILED": "Failed with an error. Changes already made stay.",
}
"""The states of an operation."""

JOBS: Mapping[str, tuple[str, str]] = {
    "WAITING": ("wait", "The job waits for its next scheduled time."),
    "RUNNING": ("wait", "The job is running."),
    "RETRYING": ("warn", "The last attempt failed; the job waits for its next attempt."),
    "PAUSED": ("off", "No runs start until someone unpauses the job."),
    "SUCCEEDED": ("good", "The last run succeeded."),
    "FAILED": ("bad", "The last run raised an error."),
    "TIMED_OUT": ("bad", "The last run took longer than its timeout."),
    "INTERRUPTED": ("bad", "The process ended, or left running(), during the last run."),
}
"""The states of a job and the results of its last run: the look, and the meaning."""

MARKS: Mapping[str, str] = {
    "PENDING": "wait", "FAILED": "warn", "BLOCKED": "wait", "DYING": "bad", "SUCCEEDED": "good", "EXPIRED": "bad",
    "DEAD": "bad", "SKIPPED": "off", "RUNNING": "wait", "DONE": "good", "STOPPED": "off", "ok": "good",
    "degraded": "warn", "down": "bad",
}  # fmt: skip
"""The CSS class of each state's label."""

REASONS: Mapping[str, str] = {
    "queued": "queued", "retry": "waiting for a retry", "delayed": "delayed", "schedule": "waiting for the schedule",
    "batch": "waiting for a full batch", "blocked": "blocked", "version": "need newer code",
    "no_handler": "without a handler", "no_owner": "without a process", "paused": "paused",
    "unavailable": "circuit breaker open", "rate": "rate-limited", "concurrency": "at the concurrency limit",
}  # fmt: skip
"""Why notifications have not run (``admin.waiting()``), after their number."""

NEEDS_HELP = ("version", "no_handler", "no_owner")
"""The reasons that do not resolve without an operator."""

WORST_FIRST: Sequence[str] = [str(state) for state in worst_first]
"""The states of a notification, the worst first."""

SIGNS: Mapping[str, str] = {"good": "✓", "warn": "▲", "bad": "✕", "wait": "◔", "off": "○"}
"""The symbol of each look, so that meaning does not depend on colour alone."""

TERMS: Mapping[str, str] = {
    "event": "A fact, recorded in the same transaction as your application's rows.",
    "action": "A unit of work that runs in one database transaction and may emit events.",
    "notification": "One handler's copy of an event to handle.",
    "handler": "A function or class that handles events. Its name is stored in each notification.",
    "fan-out": "Creates one notification per event and subscribed handler.",
    "waiting for fan-out": "Events that have no notifications yet. Normally, an event is fanned out within a second.",
    "due": "Notifications that are ready to run now.",
    "oldest due": "How long the oldest due notification has been waiting.",
    "due later": "Notifications that are delayed, scheduled, or waiting for a retry.",
    "reason": "Why an unfinished notification has not run. Each has exactly one reason.",
    "blocked": "Notifications that wait for an earlier one with the same ordering key.",
    "dead letters": "DEAD and EXPIRED notifications: they stay until someone retries or skips them.",
    "parked key": "An ordering key that is blocked by a dead letter. "
    "Its notifications wait until someone retries the dead letter or resumes the key.",
    "ordering key": "Events with the same key run in sequence, for handlers with ordered=True.",
    "failure rate": "The share of runs that failed within the last 5 minutes.",
    "succeeded": "Notifications that were handled, for each of the last 60 minutes.",
    "duration": "How long runs of the last hour took: median (p50) and 95th percentile (p95).",
    "lag": "The time from due to the start of the run.",
    "in flight": "Runs in progress, and the limit of all processes together.",
    "holder": "The process that holds the lock of the handler or partition, and runs it.",
    "lock": "Gives one process exclusive fan-out, or one handler or partition.",
    "partition": "A part of a handler's notifications, which one process at a time handles.",
    "instance": "A process that runs fan-out or handlers.",
    "loop lag": "Delay of the process's event loop. Above 0.1 s, some call is blocking the loop.",
    "stuck": "Runs that ignore their cancellation after the handler's timeout.",
    "paused": "The handler does not run until someone unpauses it. Its notifications wait.",
    "unroutable": "Notifications for a handler, or for a version of their event, that no process has.",
    "shard": "One of several databases of the outbox.",
    "clock offset": "How far a machine's clock is ahead of the database clock.",
    "operation": "A change by an operator, recorded with actor, origin and reason.",
    "attempts": "How often the handler has run for this notification.",
    "job": "A function that runs once in the cluster at each time of its schedule.",
    "next run": "The next scheduled time of a job.",
    "missed": "Scheduled times without a run: no process was running, or an earlier run took too long.",
    "correlation": "An id shared by everything that one request caused.",
    "causation": "The event that caused this event.",
    "sentinel": "The row that an action without events leaves in events.",
    "hops": "The number of events before this one in the causal chain.",
}
"""All other terms, in the order of the glossary."""


def explained(term: str) -> str:
    """Return the explanation of a term or state; empty if it is unknown."""
    return TERMS.get(term) or STATES.get(term, "")


# --- facts as JSON, with exact numbers and times in UTC --------------------------------------------


def as_json(facts: object) -> bytes:
    """Return the facts as indented JSON.

    - A time is ISO 8601 in UTC: ``2026-01-31T02:41:00Z``. A duration is in seconds.
    - A number keeps all of its digits, also within a document of an event.
    - A bounded count is an object with ``number`` and ``is_complete``.
    - A lone surrogate, which UTF-8 cannot encode, becomes its escape as text.
    - A struct has all of its fields, or those that its class lists in ``in_json``.
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
