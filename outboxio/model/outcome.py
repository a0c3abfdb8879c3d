"""Outcomes: the results of runs. Equal outcomes are written together.

Pure functions determine the outcome, and dispatch writes it. Outcomes with the same state and attempts form a bucket,
which is written by a single UPDATE; the values that differ, the next due time and the error, are passed as arrays. Each
bucket is a transaction, so the outcomes of a call with several rows of an ordering key are written in the key's order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from operator import attrgetter
from typing import Any, cast
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.errors import CrashedProcess, HandlerFailed, MalformedRow, RetryAfter, TooManyHops, Unprocessable
from outboxio.loops.log_limiter import LogLimiter
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_DEFERRED, SUCCEEDED, Notification, State
from outboxio.model.redaction import Description, Redact, keep_all
from outboxio.model.retry import RetryPolicy
from outboxio.support.clock import EPOCH, as_micros, naive_utc
from outboxio.support.duration import parse_duration
from outboxio.support.log import location_of, log_of, log_text, type_name

logger = log_of(__name__)

_limiter = LogLimiter(logger)

REFUSED_TEXT = "the database refused this error's text"
"""Replaces the text of an error that the database cannot store."""

_MICROSECOND = timedelta(microseconds=1)
_list: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Any])
_FINAL_STATES = (State.DEAD, State.EXPIRED)
MAX_DECODE_FAILURES = 3
"""Consecutive failures to decode an event, after which the notification is DEAD."""
_NEVER_HANDLED = (Unprocessable, TooManyHops, CrashedProcess, MalformedRow)


class Lease(Struct):
    """A cluster lock that this process holds or held. Outcomes are written under the term of the lease."""

    name: str
    handler_name: str
    term: int
    held: bool = True
    follows_crash: bool = False
    """True if the former holder did not release the lock."""
    partition: int = 0

    @property
    def slot(self) -> Slot:
        """The slot that the lock covers."""
        return Slot(self.handler_name, self.partition)


NO_LEASE = Lease("", "", 0)
"""The lease of a run in ``inbox.consume``, which has no notification to settle."""

Emitted = tuple[ActionRecord, list[EventRecord]]
"""The events that a handler emitted, to be committed together with the handler's success."""

QueueKey = tuple[int, str]
"""An ordering key of a handler: (id of its queue, key)."""


class Outcome(Struct, gc=False):
    """The result of a run for a notification."""

    notification_id: UUID
    lease: Lease
    state: State
    attempts: int
    next_retry_at: datetime | None = None
    error: str | None = None
    emitted: Emitted | None = None
    error_type: str | None = None
    """The class of the error, for statistics."""
    final_state: State | None = None
    """DEAD or EXPIRED, if that is decided but the hook is still to be called."""
    queue_key: QueueKey | None = None
    """The ordering key, if a call may have several rows of it: later rows are never written before earlier ones."""

    @property
    def is_deferred(self) -> bool:
        """True if the row waits for a newer version of the code, and the handler did not run."""
        return self.next_retry_at is not None and self.next_retry_at >= FIRST_DEFERRED

    def without_error_text(self) -> Outcome:
        """Return this outcome without the error's text, which the database has refused."""
        refused = Description("Unstorable", REFUSED_TEXT)
        return msgspec.structs.replace(self, error=_entry(refused))


class Bucket(Struct, frozen=True, dict=True):
    """Outcomes with the same state and attempts, which are written by a single UPDATE."""

    state: State
    attempts: int
    outcomes: list[Outcome]
    """In the order in which the runs ended, which is the order of each ordering key."""

    @cached_property
    def by_id(self) -> list[Outcome]:
        """The outcomes in primary key order, so that writers do not deadlock."""
        return sorted(self.outcomes, key=_number_of)

    @cached_property
    def ids(self) -> list[UUID]:
        """The ids in the order of :attr:`by_id`."""
        return list(map(_id_of, self.by_id))

    @property
    def queue_keys(self) -> set[QueueKey]:
        """The ordering keys of which later rows must not be written before this bucket."""
        return {outcome.queue_key for outcome in self.outcomes if outcome.queue_key is not None}

    @property
    def leases(self) -> list[Lease]:
        """The leases that the statement must find unchanged, in the order in which all processes lock them."""
        return sorted(_distinct_leases(self.outcomes), key=lambda lease: lease.name)

    @property
    def is_deferral(self) -> bool:
        """True if the rows are deferred, and the handler did not run."""
        return self.outcomes[0].is_deferred

    @property
    def has_details(self) -> bool:
        """True if the rows differ in due time and error."""
        return self.outcomes[0].error is not None

    @cached_property
    def emitted(self) -> list[Emitted]:
        """The events of these outcomes."""
        return list(filter(None, map(_emitted_of, self.outcomes)))

    def halves(self) -> tuple[Bucket, Bucket]:
        """Split the bucket, to find the value that a database refuses. The first half is written first."""
        middle = len(self.outcomes) // 2
        return (
            Bucket(self.state, self.attempts, self.outcomes[:middle]),
            Bucket(self.state, self.attempts, self.outcomes[middle:]),
        )


def in_buckets(outcomes: Iterable[Outcome]) -> list[Bucket]:
    """Group outcomes by state, attempts and kind. The buckets must be written in this order, one after the other.

    ``outcomes`` are in the order in which the runs ended. Rows of a key that differ in kind, such as a head at its
    second attempt and its followers at the first, go into several buckets, each row into that of the row before it or a
    later one: otherwise a process that dies between two buckets could leave a finished row after an unfinished one.

    A lock that was lost, held by another process and acquired again leaves outcomes under two leases. A bucket never
    mixes them, because the statement checks whether any lease of the bucket holds the handler's name.
    """
    some = list(outcomes)
    over = _with_successors(_distinct_leases(some))
    kinds = set[Any]() if over or any(map(_emitted_of, some)) else set(map(_kind_of, some))
    if len(kinds) == 1 and kinds.pop()[2:] == (None, None):
        return [Bucket(some[0].state, some[0].attempts, some)]  # nearly always, under load
    # Rows of a key that emit and rows that do not share a bucket, because such rows may alternate.
    emitting = any(outcome.emitted is not None and outcome.queue_key is not None for outcome in some)
    buckets: dict[int, list[Outcome]] = {}
    newest: dict[tuple[State, int, bool, bool, bool, bool], int] = {}
    reached: dict[QueueKey, int] = {}
    first = last = 0
    for outcome in some:
        key, has_error = outcome.queue_key, outcome.error is not None
        emits = outcome.emitted is not None or (emitting and key is not None and not has_error)
        is_over = bool(over) and id(outcome.lease) in over
        kind = (outcome.state, outcome.attempts, has_error, emits, is_over, has_error and outcome.is_deferred)
        number = newest.get(kind)
        if number is None or (key is not None and number < reached.get(key, number)):
            if key not in reached and outcome.state is SUCCEEDED:
                first = number = first - 1  # heads of different attempts go before the followers of all heads
            else:
                last = number = last + 1
            newest[kind], buckets[number] = number, []
        buckets[number].append(outcome)
        if key is not None:
            reached[key] = number
    return [Bucket(alike[0].state, alike[0].attempts, alike) for _, alike in sorted(buckets.items())]


_id_of, _lease_of, _emitted_of = attrgetter("notification_id"), attrgetter("lease"), attrgetter("emitted")
_number_of = attrgetter("notification_id.int")
_kind_of = attrgetter("state", "attempts", "error", "queue_key")


def _distinct_leases(outcomes: Iterable[Outcome]) -> list[Lease]:
    leases = list(map(_lease_of, outcomes))
    return list(dict(zip(map(id, leases), leases, strict=True)).values())


def _with_successors(leases: Sequence[Lease]) -> set[int]:
    """Return the ids of the leases that have a successor among ``leases``."""
    newest: dict[str, int] = {}
    for lease in leases:
        newest[lease.name] = max(lease.term, newest.get(lease.name, 0))
    return {id(lease) for lease in leases if lease.term < newest[lease.name]}


def success(notification: Notification, lease: Lease) -> Outcome:
    return Outcome(notification.id, lease, SUCCEEDED, notification.attempts + 1)


def expired(notification: Notification, lease: Lease) -> Outcome:
    """Return the outcome of a row that is past its retention. The handler was not called, so attempts do not change."""
    return Outcome(notification.id, lease, State.EXPIRED, notification.attempts)


class FailureRules(Struct, frozen=True, kw_only=True):
    """The rules of a handler for runs that fail."""

    policy: RetryPolicy
    retention: timedelta
    cap: timedelta
    """The longest delay between two attempts."""
    is_final: bool = False
    """True if a run is never retried."""
    is_undecodable: bool = False
    """True if the event could not be decoded, so that the handler was not called (decision 19)."""
    uses_attempt: bool = True
    """False if the handler may run only once, and has not been called."""
    owes_hook: bool = False
    """True if there is a hook: the row stays DYING until the hook was called."""
    redact: Redact = keep_all
    """Redacts each text of the error before it is stored."""
    ran: float | None = None
    """How many seconds the handler ran; ``None`` if that is not known."""


def failure(
    notification: Notification,
    lease: Lease,
    error: BaseException,
    now: datetime,
    rules: FailureRules,
    described: Description | None = None,
) -> Outcome:
    """Return the outcome of a failed run: a retry, or a final state. ``now`` is after the handler ended.

    ``described``: the description of the error, if another row of the same batch already has it.
    """
    # isinstance() would read the error's __class__, which may raise.
    kind = type(error)
    policy = rules.policy
    attempts = 1 if rules.is_final else notification.attempts + (rules.uses_attempt and not is_free(error))
    undecodable = _undecodable_before(notification) + 1 if rules.is_undecodable else 0
    tries = max(attempts, undecodable)
    description = described or Description.of(error, rules.redact)

    def entry(final_state: State | None = None) -> str:
        return _entry(description, now, max(notification.attempts + 1, undecodable), final_state, ran=rules.ran)

    def ends(state: State, attempts: int = attempts) -> Outcome:
        if rules.owes_hook:
            return Outcome(
                notification.id, lease, State.DYING, attempts, now, entry(state), error_type=description.type,
                final_state=state,
            )  # fmt: skip
        return Outcome(notification.id, lease, state, attempts, None, entry(), error_type=description.type)

    if rules.is_final or issubclass(kind, _NEVER_HANDLED):
        return ends(State.DEAD)
    most = policy.max_attempts
    is_last = most is not None and tries >= most and tries > notification.attempts
    if is_last or undecodable >= MAX_DECODE_FAILURES:
        return ends(State.DEAD, tries)
    if undecodable:
        due = _next_decoding(undecodable, error, now)
    else:
        due = next_try(error, attempts, now, policy, rules.cap, rules.redact)
    # In microseconds, because a datetime cannot be later than the year 9999.
    if as_micros(due) > notification.retention_us + rules.retention // _MICROSECOND:
        return ends(State.EXPIRED)
    return Outcome(notification.id, lease, State.FAILED, attempts, due, entry(), error_type=description.type)


_DECODING = RetryPolicy(base=timedelta(minutes=1), factor=2)
_SECOND = 1_000_000  # microseconds


def _next_decoding(undecodable: int, error: BaseException, now: datetime) -> datetime:
    """Return when to decode an event again: after 1 min, then 2 min. The microseconds are the number of failures."""
    due = now + _DECODING.wait_after(undecodable, error, timedelta.max)
    return due.replace(microsecond=undecodable)


def _undecodable_before(notification: Notification) -> int:
    """Return the number of consecutive failures to decode, from the microseconds set by :func:`_next_decoding`."""
    marked = notification.next_retry_us % _SECOND
    return marked if notification.state == State.FAILED and marked < MAX_DECODE_FAILURES else 0


def hook_failure(
    notification: Notification,
    lease: Lease,
    error: BaseException,
    now: datetime,
    last: FinalOutcome | None,
    cap: timedelta,
    redact: Redact = keep_all,
    described: Description | None = None,
) -> Outcome:
    """Return the outcome of a failed hook: the final outcome does not change, and only the hook is retried.

    ``last`` is the final outcome before the hook, or ``None`` if it was not read.
    """
    due = next_try(error, 1 if last is None else last.hook_failures + 1, now, RetryPolicy(), cap, redact)
    final = last or FinalOutcome(State.DEAD, UNKNOWN, 0)
    description = described or Description.of(error, redact)
    entry = describe(description, now, notification.attempts, hook_of=final)
    return Outcome(notification.id, lease, State.DYING, notification.attempts, due, entry)


def dead_without_hook(
    notification: Notification, lease: Lease, error: BaseException, now: datetime, redact: Redact = keep_all
) -> Outcome:
    """Return the outcome of a hook that kills the process or cannot get the row: the row is DEAD without the hook."""
    entry = describe(error, now, notification.attempts, redact=redact)
    return Outcome(notification.id, lease, State.DEAD, notification.attempts, None, entry)


class FinalOutcome(Struct, frozen=True):
    """The final outcome of a notification, decided before the hook is called."""

    state: State
    error: HandlerFailed
    hook_failures: int


UNKNOWN = HandlerFailed("unknown", "", "", None)


def final_outcome_of(errors: str) -> FinalOutcome:
    """Read the final outcome from the column ``errors``. A row that was made DYING by hand, without one, is DEAD."""
    entries = _entries(errors)
    states = [entry["verdict"] for entry in entries if entry.get("verdict") in _FINAL_STATES]
    hooks = [entry for entry in entries if isinstance(entry.get("hook_of"), dict)]
    # The error of the handler. Entries of failed hooks repeat it, because they may have pushed it out of the column.
    lost: dict[str, Any] = hooks[-1]["hook_of"] if hooks else {}
    own = next((entry for entry in reversed(entries) if "hook_of" not in entry), lost)
    found, attempt = Description.read(own), own.get("attempt")
    error = HandlerFailed(
        found.type or UNKNOWN.type, found.message, found.traceback, attempt if isinstance(attempt, int) else None
    )
    return FinalOutcome(State(states[-1]) if states else State.DEAD, error, len(hooks))


def _entries(errors: str) -> list[dict[str, Any]]:
    """Return the entries of the column, without malformed values that were written by hand."""
    try:
        return [entry for entry in _list.decode(errors) if isinstance(entry, dict)]
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        return []


def describe(
    error: BaseException | Description,
    now: datetime,
    attempt: int,
    *,
    final_state: State | None = None,
    hook_of: FinalOutcome | None = None,
    redact: Redact = keep_all,
) -> str:
    """Return an entry of the column ``errors``: time, type, message, short traceback, attempt."""
    description = error if type(error) is Description else Description.of(cast(BaseException, error), redact)
    return _entry(description, now, attempt, final_state, hook_of)


def is_free(error: BaseException) -> bool:
    """Return True if the run does not count as an attempt."""
    try:
        return issubclass(type(error), RetryAfter) and not error.count_attempt  # type: ignore[attr-defined]  # RetryAfter has one
    except BaseException:  # a subclass whose attribute raises
        return False


def next_try(
    error: BaseException, attempts: int, now: datetime, policy: RetryPolicy, cap: timedelta, redact: Redact
) -> datetime:
    """Return the time of the retry after ``attempts`` failed runs, the last of which raised ``error``. Never raises."""
    try:
        return _next_try(error, attempts, now, policy, cap)
    except OverflowError:
        return datetime.max
    except BaseException as broken:
        # A backoff callable or a delay that raises must not lose the row that failed.
        key = (type_name(error), type_name(broken))
        if _limiter.admits(key, logging.ERROR):
            _limiter.log(
                key, logging.ERROR, "invalid retry delay from %s; using the default backoff: %s at %s",
                log_text(error, redact), log_text(broken, redact), location_of(broken), error_type=type_name(broken),
            )  # fmt: skip
        return now + RetryPolicy().wait_after(max(attempts, 1), error, cap)


def _next_try(error: BaseException, attempts: int, now: datetime, policy: RetryPolicy, cap: timedelta) -> datetime:
    """Return the time of the retry, from the error or the policy. Both are user code and may return anything."""
    if not issubclass(type(error), RetryAfter):
        return now + policy.wait_after(max(attempts, 1), error, cap)
    retry: Any = error
    if retry.at is None:
        return now + parse_duration(retry.delay, key="RetryAfter.delay")
    return max(_plain(retry.at), EPOCH)  # dispatch reads due rows from the epoch on


def _plain(time: datetime) -> datetime:
    """Convert to naive UTC, and to a plain ``datetime``, because a subclass may behave arbitrarily."""
    try:
        naive = naive_utc(time)
    except OverflowError:  # within a day of the latest date, where the zone does not matter
        naive = time.replace(tzinfo=None)
    return datetime(
        naive.year, naive.month, naive.day, naive.hour, naive.minute, naive.second, naive.microsecond
    )  # fmt: skip


def _entry(
    description: Description,
    now: datetime | None = None,
    attempt: int | None = None,
    final_state: State | None = None,
    hook_of: FinalOutcome | None = None,
    ran: float | None = None,
) -> str:
    time = None if now is None else now.isoformat(timespec="microseconds")
    texts = {"type": description.type, "message": description.message, "traceback": description.traceback}
    entry: dict[str, Any] = {"time": time, **texts, "attempt": attempt}
    if ran is not None:
        entry["ran"] = round(ran, 6)
    if final_state is not None:
        entry["verdict"] = final_state
    if hook_of is not None:
        of = hook_of.error
        entry["verdict"] = hook_of.state
        entry["hook_of"] = {
            "type": of.type, "message": of.message, "traceback": of.traceback, "attempt": of.attempt,
        }  # fmt: skip
    return msgspec.json.encode(entry).decode()
