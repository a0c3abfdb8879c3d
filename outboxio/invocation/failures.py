"""The exceptions of failed runs, for a test that waits for the runs: ``outboxio.testing.drain`` raises them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from outboxio.model.notification import Notification

Failures = dict[int, BaseException]
"""Exceptions of handlers, without repeats, in the order of judging."""

_listening: list[tuple[object, Failures]] = []


@contextmanager
def listening(outbox: object) -> Generator[Failures]:
    """Gather the exceptions of an outbox's handlers until the block ends."""
    failures: Failures = {}
    entry = (outbox, failures)
    _listening.append(entry)
    try:
        yield failures
    finally:
        _listening[:] = [other for other in _listening if other is not entry]


def tell_failure(outbox: object, handler_name: str, notification: Notification, error: BaseException) -> None:
    """Add a failure to the gathered exceptions of the outbox, if a test gathers exceptions."""
    for owner, failures in _listening:
        if owner is outbox and id(error) not in failures:
            error.add_note(
                f"raised by handler {handler_name!r} for event {notification.event_id} "
                f"({notification.event_type}, attempt {notification.attempts + 1})"
            )
            failures[id(error)] = error


def joined(failures: Failures) -> BaseException | None:
    """The exception to raise: a single exception unchanged, several as a group; ``None`` without failures.

    A single exception that is no ``Exception``, such as ``SystemExit``, is put into a group: raised alone, it would end
    the test run.
    """
    errors = list(failures.values())
    if not errors:
        return None
    if len(errors) == 1 and isinstance(errors[0], Exception):
        return errors[0]
    told = "1 run of a handler" if len(errors) == 1 else f"{len(errors)} runs of handlers"
    return BaseExceptionGroup(f"{told} failed", errors)
