"""Why unfinished notifications have not run, for single rows and for counts.

Every row that is not terminal has exactly one reason. For each reason, a rule in ``rules.py`` reports rows that have
waited too long. Rows with an unforeseen cause are ``queued``, and therefore reported too (decision 80).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

from outboxio.health.facts import SOON, HandlerFacts, RowFacts, ShardFacts
from outboxio.health.values import MOST, counted, quantity
from outboxio.model.notification import FIRST_DEFERRED, NotificationRecord, State, version_awaited


class Reason(StrEnum):
    """Why an unfinished notification has not run."""

    QUEUED = "queued"
    """Due, and waiting for its turn; or running now."""
    RETRY = "retry"
    """Failed, and waiting for its next attempt."""
    DELAYED = "delayed"
    """Due later, because its event has ``available_at``, or ``RetryAfter`` has set the time."""
    SCHEDULE = "schedule"
    """Waiting for the next time of the handler's batch schedule."""
    BATCH = "batch"
    """Waiting for more events to fill the batch."""
    BLOCKED = "blocked"
    """Waiting for an earlier notification of its ordering key, or for handlers with a lower priority number."""
    VERSION = "version"
    """Waiting for an event version that no process with the handler has."""
    NO_HANDLER = "no_handler"
    """No process has the handler."""
    NO_OWNER = "no_owner"
    """No process holds the lock of the partition."""
    PAUSED = "paused"
    """An operator has paused the handler."""
    UNAVAILABLE = "unavailable"
    """The circuit breaker of the handler is open."""
    RATE = "rate"
    """Held back by the handler's ``rate``."""
    CONCURRENCY = "concurrency"
    """The handler is at its concurrency limit."""


def reason_of(state: State, due: datetime, handler: HandlerFacts | None, shard: ShardFacts, *, is_held: bool) -> Reason:
    """Return why an unfinished row has not run.

    ``due``: its ``next_retry_at``. ``handler``: ``None`` if no process has announced the handler. ``is_held``: True if
    a process holds the row's partition.
    """
    if handler is None or handler.is_gone:
        return Reason.NO_HANDLER
    if state == State.BLOCKED:
        return Reason.BLOCKED
    if due >= FIRST_DEFERRED:
        return Reason.VERSION
    if due > shard.now + SOON:
        if state != State.PENDING:
            return Reason.RETRY
        return Reason.SCHEDULE if shard.reported(handler.name).schedule else Reason.DELAYED
    if handler.paused_since is not None:
        return Reason.PAUSED
    return _of_due(handler, shard) if is_held else Reason.NO_OWNER


def _of_due(handler: HandlerFacts, shard: ShardFacts) -> Reason:
    """Return why due rows of a handler are waiting although its lock is held."""
    report = shard.reported(handler.name)
    if report.circuit is not None:
        return Reason.UNAVAILABLE
    if report.limited_to:
        return Reason.RATE
    if report.limit and report.in_flight >= report.limit:
        return Reason.CONCURRENCY
    is_young = handler.oldest_due is not None and shard.age(handler.oldest_due) < (report.max_wait or 0.0)
    return Reason.BATCH if is_young else Reason.QUEUED


_MOST_VERSIONS = 3

Counts = Mapping[Reason, int]


def counts_of(rows: RowFacts, handler: HandlerFacts | None, shard: ShardFacts) -> Counts:
    """Count the rows of one or more stored handler names by reason. Reasons without rows are omitted."""
    later, now = shard.now + 2 * SOON, shard.now
    groups: list[tuple[int, State, datetime, bool]] = [
        (rows.due - rows.unowned, State.PENDING, now, True),
        (rows.unowned, State.PENDING, now, False),
        (rows.retrying, State.FAILED, later, True),
        (rows.waiting - rows.retrying, State.PENDING, later, True),
        (sum(one.number for one in rows.deferred), State.PENDING, FIRST_DEFERRED, True),
        (rows.blocked, State.BLOCKED, now, True),
    ]
    counts = Counter[Reason]()
    for number, state, due, is_held in groups:
        if number > 0:
            counts[reason_of(state, due, handler, shard, is_held=is_held)] += number
    return counts


def waiting_in(shard: ShardFacts) -> Mapping[str, Counts]:
    """Count the unfinished rows of a shard by stored handler name and reason, each row once."""
    return {name: counts_of(rows, shard.handler_of(name), shard) for name, rows in shard.rows.items()}


def awaited_versions(handler: HandlerFacts) -> str:
    """Describe the notifications that wait for newer event versions, naming the three most frequent versions."""
    numbers = Counter[tuple[str, int]]()
    for one in handler.deferred:
        numbers[one.event_type, one.version] += one.number
    number, several = numbers.total(), len(numbers) > 1
    versions = ", ".join(
        f"version {version} of `{event_type}`{f' ({counted(each)})' if several else ''}"
        for (event_type, version), each in numbers.most_common(_MOST_VERSIONS)
    )
    more = f" and {len(numbers) - _MOST_VERSIONS} more" if len(numbers) > _MOST_VERSIONS else ""
    return (
        f"{quantity(min(MOST, number), 'notification')} of `{handler.name}` {'waits' if number == 1 else 'wait'} for "
        f"{versions}{more}, but no process that runs the handler has {'them' if several else 'it'}: deploy the newer "
        "code to the processes that run handlers."
    )


# --- the reason of a single row, as text ---------------------------------------------------

_SENTENCES: Mapping[Reason, str] = {
    Reason.QUEUED: "Due since {due}: queued or running.",
    Reason.RETRY: "Waits for its retry at {due}, after attempt {attempts} failed.",
    Reason.DELAYED: "Delayed until {due}.",
    Reason.SCHEDULE: "Waits for the schedule of `{name}`, `{report.schedule}`: next at {due}.",
    Reason.BATCH: "Due since {due}: `{name}` waits up to {report.max_wait:g} s for a full batch.",
    Reason.BLOCKED: "Waits behind {before}.",
    Reason.VERSION: "Waits for version {version} of `{type}`: deploy the newer code to the workers of `{name}`.",
    Reason.NO_HANDLER: "No process has a handler `{name}`: deploy it, or add `aliases={{'{name}'}}` to its successor.",
    Reason.NO_OWNER: "Due since {due}: no process holds partition {partition} of `{name}`.",
    Reason.PAUSED: "`{name}` is paused: `outboxio unpause {name}` resumes it.",
    Reason.UNAVAILABLE: "The circuit breaker of `{name}` is open: {report.circuit.reason}.",
    Reason.RATE: "Due since {due}: `{name}` is limited to {report.limited_to}.",
    Reason.CONCURRENCY: "Due since {due}: all {report.limit} runs of `{name}` are in use, possibly one by this row.",
}


def without_error(reason: str) -> str:
    """Return the text of :func:`explain` without the error message, which may quote a payload."""
    for separator in (" is open: ", "Unknown: "):
        if separator in reason:  # which may be about the first notification of the key
            return f"{reason.partition(separator)[0]}{separator.rstrip(': ')}."
    return reason


def explain(record: NotificationRecord, shard: ShardFacts, head: str = "") -> str:
    """Explain in a sentence why a notification has not run. ``head``: the first notification of its key."""
    if shard.error is not None or shard.schema is not None:
        return f"Unknown: {shard.error or shard.schema}"
    handler = shard.handler_of(record.handler_name)
    is_held = handler is not None and record.partition_number not in handler.unheld.get(record.handler_name, ())
    reason = reason_of(record.state, record.next_retry_at, handler, shard, is_held=is_held)
    before = "handlers with a lower priority number"
    if record.ordering_key is not None:
        before = f"{head or 'another notification'}, the first of key `{record.ordering_key}`"
    due = record.next_retry_at
    sentence = _SENTENCES[reason]
    if reason is Reason.RETRY and not record.attempts:  # RetryAfter(count_attempt=False), or a run that did not begin
        sentence = "Waits for its next attempt at {due}."
    return sentence.format(
        name=record.handler_name, due=f"{due:%Y-%m-%d %H:%M:%S} UTC", attempts=record.attempts, before=before,
        version=version_awaited(due) if reason is Reason.VERSION else "", type=record.event_type,
        partition=record.partition_number, report=shard.reported("" if handler is None else handler.name),
    )  # fmt: skip
