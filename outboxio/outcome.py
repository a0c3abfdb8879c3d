"""Outcomes: what happened to one notification, and how equal ones are written together.

Pure functions decide; the dispatcher writes. An outcome knows its bucket, (state, attempts): one UPDATE each. What
differs from row to row within it, the next due time and the error, travels as arrays.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.backoff import RetryPolicy
from outboxio.clock import naive_utc
from outboxio.duration import parse_duration
from outboxio.errors import CrashedProcess, HandlerFailed, RetryAfter, TooManyHops, Unprocessable
from outboxio.event import ActionRecord, EventRecord
from outboxio.notification import SUCCEEDED, Notification, State
from outboxio.redaction import Redact, as_it_is

logger = logging.getLogger(__name__)

LONGEST_MESSAGE = 2_000  # characters of an error that are kept
LONGEST_TRACEBACK = 4_000
LONGEST_SHOWN = 500


class Lease(Struct):
    """One cluster lock that this process holds, or held: outcomes are written under its term."""

    name: str
    handler_name: str
    term: int
    held: bool = True
    follows_crash: bool = False
    """Whether the holder before us did not give it back."""


Emitted = tuple[ActionRecord, list[EventRecord]]
"""What a handler emitted: events that are committed together with its success."""


class Outcome(Struct, gc=False):
    """What one run did to one notification."""

    notification_id: UUID
    lease: Lease
    state: State
    attempts: int
    next_retry_at: datetime | None = None
    error: str | None = None
    emitted: Emitted | None = None

    def without_error_text(self) -> Outcome:
        """The same outcome, for a database that refused the error's text."""
        return msgspec.structs.replace(self, error=_error_json("Unstorable", "the database refused this error's text"))


class Bucket(Struct, frozen=True):
    """Outcomes that one UPDATE writes: they share state and attempts."""

    state: State
    attempts: int
    outcomes: list[Outcome]

    @property
    def ids(self) -> list[UUID]:
        return [outcome.notification_id for outcome in self.outcomes]

    @property
    def leases(self) -> list[Lease]:
        """The leases that the statement must find unchanged, in the order in which every process locks them."""
        distinct = {id(outcome.lease): outcome.lease for outcome in self.outcomes}
        return sorted(distinct.values(), key=lambda lease: lease.name)

    @property
    def has_details(self) -> bool:
        """Whether rows differ in more than their id."""
        return self.outcomes[0].error is not None

    @property
    def emitted(self) -> list[Emitted]:
        """What the handlers of these outcomes emitted."""
        return [outcome.emitted for outcome in self.outcomes if outcome.emitted is not None]

    def halves(self) -> tuple[Bucket, Bucket]:
        """The bucket cut in two, to find the value that a database refuses."""
        middle = len(self.outcomes) // 2
        return (
            Bucket(self.state, self.attempts, self.outcomes[:middle]),
            Bucket(self.state, self.attempts, self.outcomes[middle:]),
        )


def in_buckets(outcomes: Iterable[Outcome]) -> list[Bucket]:
    """The outcomes by state, attempts and kind; within a bucket in primary key order, so that writers never cross.

    A lock that was lost, and taken again after another process had it, has left outcomes under two leases. They keep
    apart, for the statement asks whether one of a bucket's leases holds the handler's name, not which of them.
    """
    some = list(outcomes)
    over = _with_successors({id(outcome.lease): outcome.lease for outcome in some}.values())
    buckets: dict[tuple[State, int, bool, bool, bool], list[Outcome]] = {}
    for outcome in some:
        is_over = bool(over) and id(outcome.lease) in over
        kind = (outcome.state, outcome.attempts, outcome.error is None, outcome.emitted is None, is_over)
        buckets.setdefault(kind, []).append(outcome)
    return [
        Bucket(kind[0], kind[1], sorted(alike, key=lambda outcome: outcome.notification_id.int))
        for kind, alike in buckets.items()
    ]


def _with_successors(leases: Iterable[Lease]) -> set[int]:
    """The ids of those leases that have a successor among the others."""
    leases = list(leases)
    newest: dict[str, int] = {}
    for lease in leases:
        newest[lease.name] = max(lease.term, newest.get(lease.name, 0))
    return {id(lease) for lease in leases if lease.term < newest[lease.name]}


def success(notification: Notification, lease: Lease) -> Outcome:
    return Outcome(notification.id, lease, SUCCEEDED, notification.attempts + 1)


def expired(notification: Notification, lease: Lease) -> Outcome:
    """The handler was not called, so no attempt is used up."""
    return Outcome(notification.id, lease, State.EXPIRED, notification.attempts)


def failure(
    notification: Notification,
    lease: Lease,
    error: BaseException,
    now: datetime,
    policy: RetryPolicy,
    *,
    retention: timedelta,
    cap: timedelta,
    is_final: bool = False,
    owes_hook: bool = False,
    redact: Redact = as_it_is,
) -> Outcome:
    """What a run that raised means: another try, or the end. ``now`` is after the handler ended.

    ``is_final``: there is no other try. ``owes_hook``: an end is a verdict only, until a hook has heard of it.
    ``redact`` sees to every text of the error before it is kept.
    """
    attempts = 1 if is_final else notification.attempts + 1
    if isinstance(error, RetryAfter) and not error.count_attempt and not is_final:
        attempts = notification.attempts
    described = describe(error, now, notification.attempts + 1, redact=redact)

    def ends(state: State) -> Outcome:
        if owes_hook:
            verdict = describe(error, now, notification.attempts + 1, verdict=state, redact=redact)
            return Outcome(notification.id, lease, State.DYING, attempts, now, verdict)
        return Outcome(notification.id, lease, state, attempts, None, described)

    if is_final or isinstance(error, Unprocessable | TooManyHops | CrashedProcess):
        return ends(State.DEAD)
    if policy.max_attempts is not None and attempts >= policy.max_attempts and attempts > notification.attempts:
        return ends(State.DEAD)
    due = _next_try(error, attempts, now, policy, cap, redact)
    if due > notification.retention_from + retention:
        return ends(State.EXPIRED)
    return Outcome(notification.id, lease, State.FAILED, attempts, due, described)


def hook_failure(
    notification: Notification,
    lease: Lease,
    error: BaseException,
    now: datetime,
    last: Verdict | None,
    cap: timedelta,
    redact: Redact = as_it_is,
) -> Outcome:
    """The hook failed: the verdict stands, and only the hook is tried again. ``last``: ``None`` if it was not read."""
    due = _next_try(error, 1 if last is None else last.hook_failures + 1, now, RetryPolicy(), cap, redact)
    verdict = last or Verdict(State.DEAD, UNKNOWN, 0)
    described = describe(error, now, notification.attempts, hook_of=verdict, redact=redact)
    return Outcome(notification.id, lease, State.DYING, notification.attempts, due, described)


def hook_crash(notification: Notification, lease: Lease, error: BaseException, now: datetime) -> Outcome:
    """The hook ends its process: the row is DEAD without it."""
    return Outcome(
        notification.id, lease, State.DEAD, notification.attempts, None, describe(error, now, notification.attempts)
    )


class Verdict(Struct, frozen=True):
    """What was decided about a notification whose hook is owed."""

    state: State
    error: HandlerFailed
    hook_failures: int


UNKNOWN = HandlerFailed("unknown", "", "", None)


def verdict_of(errors: str) -> Verdict:
    """The verdict in the ``errors`` column. A row that somebody made DYING by hand, without one, is DEAD."""
    entries = msgspec.json.decode(errors, type=list[dict[str, Any]])
    state = next((entry["verdict"] for entry in reversed(entries) if entry.get("verdict")), State.DEAD)
    hooks = [entry for entry in entries if "hook_of" in entry]
    unknown: dict[str, Any] = {}
    # Of the handler itself; where failed hooks have pushed it out of the column, they say what it was.
    own = next(
        (entry for entry in reversed(entries) if "hook_of" not in entry), hooks[-1]["hook_of"] if hooks else unknown
    )
    error = HandlerFailed(
        own.get("type", UNKNOWN.type), own.get("message", ""), own.get("traceback", ""), own.get("attempt")
    )
    return Verdict(State(state), error, len(hooks))


def describe(
    error: BaseException,
    now: datetime,
    attempt: int,
    *,
    verdict: State | None = None,
    hook_of: Verdict | None = None,
    redact: Redact = as_it_is,
) -> str:
    """One entry of the ``errors`` column: time, type, message, short traceback, attempt.

    Texts are redacted before they are cut, so that nothing is cut into what ``redact`` would not recognise.
    """
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-6))
    try:
        message = str(error)
    except BaseException as broken:  # an exception whose own __str__ fails must not lose its row
        message = f"<unprintable: {type(broken).__name__}>"
    return _error_json(
        redact(_type_name(error)), redact(message), now, redact(trace), attempt, verdict, hook_of
    )  # fmt: skip


def shown(error: BaseException, redact: Redact = as_it_is) -> str:
    """An error as a log line shows it: never endless, and never another error."""
    try:
        return _storable(redact(repr(error)), LONGEST_SHOWN)
    except BaseException:
        return f"<unprintable {_type_name(error)}>"


def _next_try(
    error: BaseException, attempts: int, now: datetime, policy: RetryPolicy, cap: timedelta, redact: Redact
) -> datetime:
    try:
        if not isinstance(error, RetryAfter):
            return now + policy.wait_after(max(attempts, 1), error, cap)
        if error.at is not None:
            return naive_utc(error.at)
        return now + parse_duration(error.delay, key="RetryAfter.delay")
    except OverflowError:
        return datetime.max
    except BaseException as broken:
        # A backoff callable, or a delay, that is itself broken must not lose the row that failed. Its traceback shows
        # the handler's error, too.
        trace = redact("".join(traceback.format_exception(broken)))
        logger.error("cannot tell when to retry after %s; the default backoff applies\n%s", shown(error, redact), trace)
        return now + RetryPolicy().wait_after(max(attempts, 1), error, cap)


def _error_json(
    kind: str,
    message: str,
    now: datetime | None = None,
    trace: str = "",
    attempt: int | None = None,
    verdict: State | None = None,
    hook_of: Verdict | None = None,
) -> str:
    entry: dict[str, Any] = {
        "time": None if now is None else now.isoformat(timespec="microseconds"),
        "type": _storable(kind, LONGEST_MESSAGE),
        "message": _storable(message, LONGEST_MESSAGE),
        "traceback": _storable(trace[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK),
        "attempt": attempt,
    }
    if verdict is not None:
        entry["verdict"] = verdict
    if hook_of is not None:
        of = hook_of.error
        entry["verdict"] = hook_of.state
        entry["hook_of"] = {
            "type": of.type, "message": of.message, "traceback": of.traceback, "attempt": of.attempt,
        }  # fmt: skip
    return msgspec.json.encode(entry).decode()


def _storable(text: str, longest: int) -> str:
    """Text that every database stores: no NUL, no lone surrogates, not endless."""
    clean = text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= longest else f"{clean[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "outboxio.errors")
        else f"{cls.__module__}.{cls.__qualname__}"
    )
