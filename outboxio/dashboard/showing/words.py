"""The words of the dashboard, each with one or two sentences: column heads and the glossary show the sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outboxio.model.operating.stored_event import WORST_FIRST as worst_first

STATES: Mapping[str, str] = {
    "PENDING": "The notification waits for its handler.",
    "FAILED": "The handler has failed, and will be retried at the due date. Nobody needs to do anything yet.",
    "BLOCKED": "An earlier notification with the same ordering key is not finished; this notification waits behind it.",
    "DYING": "The notification is given up, and its on_dead hook has still to run.",
    "SUCCEEDED": "The handler has handled the event.",
    "EXPIRED": "The notification has outlived its retention window without success. Retry or skip it.",
    "DEAD": "The notification is given up: no further retry, until somebody retries or skips it.",
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
    "deferred": "Notifications of an event version that no process that runs the handler has: deploy the newer code.",
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
