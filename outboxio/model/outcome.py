"""Outcomes: the result of a run for a notification. Equal outcomes are written together.

Pure functions decide, dispatch writes. Outcomes of equal state and attempts are a bucket, which a single UPDATE writes.
The values that differ within a bucket, the next due time and the error, travel as arrays. Each bucket is a transaction
of its own, so the outcomes of a call with several rows of an ordering key are written in the order of the key.
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

from outboxio.errors import CrashedProcess, HandlerFailed, RetryAfter, TooManyHops, Unprocessable, UnreadableRow
from outboxio.loops.flood import Flood
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_DEFERRED, SUCCEEDED, Notification, State
from outboxio.model.redaction import Description, Redact, keep_all
from outboxio.model.retry import RetryPolicy
from outboxio.support.clock import EPOCH, as_micros, naive_utc
from outboxio.support.duration import parse_duration
from outboxio.support.log import log_of, log_text, place_of, type_name

logger = log_of(__name__)

_flood = Flood(logger)

REFUSED_TEXT = "the database refused this error's text"
"""The substitute for the text of an error that the database cannot store."""

_MICROSECOND = timedelta(microseconds=1)
_list: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Any])
_VERDICTS = (State.DEAD, State.EXPIRED)
MOST_DECODINGS = 3
"""Failures in a row to decode an event, after which the notification is DEAD."""
_NEVER_HANDLED = (Unprocessable, TooManyHops, CrashedProcess, UnreadableRow)


class Lease(Struct):
    """A cluster lock that this process holds or held. Outcomes are written under the term of the lease."""

    name: str
    handler_name: str
    term: int
    held: bool = True
    follows_crash: bool = False
    """True if the former holder did not give the lock back."""
    partition: int = 0

    @property
    def slot(self) -> Slot:
        """The slot that the lock covers."""
        return Slot(self.handler_name, self.partition)


NO_LEASE = Lease("", "", 0)
"""The lease of a run in ``inbox.consume``, which has no notification to settle."""

Emitted = tuple[ActionRecord, list[EventRecord]]
"""The events that a handler emitted, to be committed together with the handler's success."""

Place = tuple[int, str]
"""One ordering key of one handler: (id of its queue, key)."""


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
    verdict: State | None = None
    """The end that stands already while a hook is owed: DEAD or EXPIRED. ``None`` without a new verdict."""
    place: Place | None = None
    """The ordering key, if a call may have several rows of the key: no later row is written before an earlier row."""

    @property
    def rests(self) -> bool:
        """True if the row is put to rest (``runs/resting.py``), which is no result of a run."""
        return self.next_retry_at is not None and self.next_retry_at >= FIRST_DEFERRED

    def without_error_text(self) -> Outcome:
        """This outcome with a substitute for the error's text, which the database has refused."""
        refused = Description("Unstorable", REFUSED_TEXT)
        return msgspec.structs.replace(self, error=_entry(refused))


class Bucket(Struct, frozen=True, dict=True):
    """Outcomes of equal state and attempts, which a single UPDATE writes."""

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
    def places(self) -> set[Place]:
        """The ordering keys of which later rows must not be written before this bucket."""
        return {outcome.place for outcome in self.outcomes if outcome.place is not None}

    @property
    def leases(self) -> list[Lease]:
        """The leases that the statement must find unchanged, in the order in which every process locks them."""
        return sorted(_distinct_leases(self.outcomes), key=lambda lease: lease.name)

    @property
    def is_rest(self) -> bool:
        """True if the rows were put to rest, which is no result of a run."""
        return self.outcomes[0].rests

    @property
    def has_details(self) -> bool:
        """True if the rows differ in due time and error."""
        return self.outcomes[0].error is not None

    @cached_property
    def emitted(self) -> list[Emitted]:
        """The events of these outcomes."""
        return list(filter(None, map(_emitted_of, self.outcomes)))

    def halves(self) -> tuple[Bucket, Bucket]:
        """The bucket cut in two, to find the value that a database refuses. The first half is written first."""
        middle = len(self.outcomes) // 2
        return (
            Bucket(self.state, self.attempts, self.outcomes[:middle]),
            Bucket(self.state, self.attempts, self.outcomes[middle:]),
        )


def in_buckets(outcomes: Iterable[Outcome]) -> list[Bucket]:
    """The outcomes by state, attempts and kind. The buckets are to be written in this order, one after the other.

    ``outcomes`` are in the order in which the runs ended. Rows of a key that differ in kind, such as a head at its
    second attempt and its followers at the first, are in several buckets: each row in the bucket of the row before, or
    in a later bucket. Otherwise a process that dies between two buckets would leave a row finished behind an
    unfinished row. So a kind may have several buckets, but only for such keys.

    A lock that was lost, held by a second process and taken again leaves outcomes under two leases. A bucket never
    mixes the two, because the statement asks if any lease of the bucket holds the handler's name.
    """
    some = list(outcomes)
    over = _with_successors(_distinct_leases(some))
    kinds = set[Any]() if over or any(map(_emitted_of, some)) else set(map(_kind_of, some))
    if len(kinds) == 1 and kinds.pop()[2:] == (None, None):
        return [Bucket(some[0].state, some[0].attempts, some)]  # nearly always, under load
    # Rows of a key that emit and rows that do not share a bucket, because such rows may alternate.
    emitting = any(outcome.emitted is not None and outcome.place is not None for outcome in some)
    buckets: dict[int, list[Outcome]] = {}
    newest: dict[tuple[State, int, bool, bool, bool, bool], int] = {}
    reached: dict[Place, int] = {}
    first = last = 0
    for outcome in some:
        place, has_error = outcome.place, outcome.error is not None
        emits = outcome.emitted is not None or (emitting and place is not None and not has_error)
        is_over = bool(over) and id(outcome.lease) in over
        kind = (outcome.state, outcome.attempts, has_error, emits, is_over, has_error and outcome.rests)
        number = newest.get(kind)
        if number is None or (place is not None and number < reached.get(place, number)):
            if place not in reached and outcome.state is SUCCEEDED:
                first = number = first - 1  # heads of different attempts go before the followers of all heads
            else:
                last = number = last + 1
            newest[kind], buckets[number] = number, []
        buckets[number].append(outcome)
        if place is not None:
            reached[place] = number
    return [Bucket(alike[0].state, alike[0].attempts, alike) for _, alike in sorted(buckets.items())]


_id_of, _lease_of, _emitted_of = attrgetter("notification_id"), attrgetter("lease"), attrgetter("emitted")
_number_of = attrgetter("notification_id.int")
_kind_of = attrgetter("state", "attempts", "error", "place")


def _distinct_leases(outcomes: Iterable[Outcome]) -> list[Lease]:
    leases = list(map(_lease_of, outcomes))
    return list(dict(zip(map(id, leases), leases, strict=True)).values())


def _with_successors(leases: Sequence[Lease]) -> set[int]:
    """The ids of the leases that have a successor among ``leases``."""
    newest: dict[str, int] = {}
    for lease in leases:
        newest[lease.name] = max(lease.term, newest.get(lease.name, 0))
    return {id(lease) for lease in leases if lease.term < newest[lease.name]}


def success(notification: Notification, lease: Lease) -> Outcome:
    return Outcome(notification.id, lease, SUCCEEDED, notification.attempts + 1)


def expired(notification: Notification, lease: Lease) -> Outcome:
    """The outcome of a row that is past the retention. The handler was not called, so no attempt is used up."""
    return Outcome(notification.id, lease, State.EXPIRED, notification.attempts)


class FailureRules(Struct, frozen=True, kw_only=True):
    """The rules of a handler for runs that fail."""

    policy: RetryPolicy
    retention: timedelta
    cap: timedelta
    """The longest wait between two tries."""
    is_final: bool = False
    """True if a run has no second try."""
    is_undecodable: bool = False
    """True if the event could not be decoded, so that the handler was not called (decision 67)."""
    uses_attempt: bool = True
    """False if the handler may run a single time, and has not been called."""
    owes_hook: bool = False
    """True if a hook is owed at the end: the verdict is not the end before the hook was called."""
    redact: Redact = keep_all
    """Redacts each text of the error before the text is kept."""
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
    """The outcome of a run that raised: a second try, or the end. ``now`` is after the handler ended.

    ``described``: the error in words, if the error was described before, for a row of the same batch.
    """
    # isinstance() would read the error's __class__, and an error may refuse to answer.
    kind = type(error)
    policy = rules.policy
    attempts = 1 if rules.is_final else notification.attempts + (rules.uses_attempt and not is_free(error))
    undecodable = _undecodable_before(notification) + 1 if rules.is_undecodable else 0
    tries = max(attempts, undecodable)
    told = described or Description.of(error, rules.redact)

    def entry(verdict: State | None = None) -> str:
        return _entry(told, now, max(notification.attempts + 1, undecodable), verdict, ran=rules.ran)

    def ends(state: State, attempts: int = attempts) -> Outcome:
        if rules.owes_hook:
            return Outcome(
                notification.id, lease, State.DYING, attempts, now, entry(state), error_type=told.type, verdict=state
            )
        return Outcome(notification.id, lease, state, attempts, None, entry(), error_type=told.type)

    if rules.is_final or issubclass(kind, _NEVER_HANDLED):
        return ends(State.DEAD)
    most = policy.max_attempts
    is_last = most is not None and tries >= most and tries > notification.attempts
    if is_last or undecodable >= MOST_DECODINGS:
        return ends(State.DEAD, tries)
    if undecodable:
        due = _next_decoding(undecodable, error, now)
    else:
        due = next_try(error, attempts, now, policy, rules.cap, rules.redact)
    # In microseconds, because a datetime cannot be later than the year 9999.
    if as_micros(due) > notification.retention_us + rules.retention // _MICROSECOND:
        return ends(State.EXPIRED)
    return Outcome(notification.id, lease, State.FAILED, attempts, due, entry(), error_type=told.type)


_DECODING = RetryPolicy(base=timedelta(minutes=1), factor=2)
_SECOND = 1_000_000  # microseconds


def _next_decoding(undecodable: int, error: BaseException, now: datetime) -> datetime:
    """When to decode an event again: after 1 min, then after 2 min. The microseconds are the number of failures."""
    due = now + _DECODING.wait_after(undecodable, error, timedelta.max)
    return due.replace(microsecond=undecodable)


def _undecodable_before(notification: Notification) -> int:
    """How many times in a row the event could not be decoded, by the microseconds of :func:`_next_decoding`."""
    marked = notification.next_retry_us % _SECOND
    return marked if notification.state == State.FAILED and marked < MOST_DECODINGS else 0


def hook_failure(
    notification: Notification,
    lease: Lease,
    error: BaseException,
    now: datetime,
    last: Verdict | None,
    cap: timedelta,
    redact: Redact = keep_all,
    described: Description | None = None,
) -> Outcome:
    """The outcome of a hook that failed: the verdict stands, and only the hook is tried again.

    ``last`` is the verdict, or ``None`` if the verdict was not read.
    """
    due = next_try(error, 1 if last is None else last.hook_failures + 1, now, RetryPolicy(), cap, redact)
    verdict = last or Verdict(State.DEAD, UNKNOWN, 0)
    told = described or Description.of(error, redact)
    entry = describe(told, now, notification.attempts, hook_of=verdict)
    return Outcome(notification.id, lease, State.DYING, notification.attempts, due, entry)


def dead_without_hook(
    notification: Notification, lease: Lease, error: BaseException, now: datetime, redact: Redact = keep_all
) -> Outcome:
    """The outcome of a hook that ends the process or cannot get the row: the row is DEAD without the hook."""
    entry = describe(error, now, notification.attempts, redact=redact)
    return Outcome(notification.id, lease, State.DEAD, notification.attempts, None, entry)


class Verdict(Struct, frozen=True):
    """The decision about a notification before the hook was called."""

    state: State
    error: HandlerFailed
    hook_failures: int


UNKNOWN = HandlerFailed("unknown", "", "", None)


def verdict_of(errors: str) -> Verdict:
    """The verdict in the ``errors`` column. A row that was made DYING by hand, without a verdict, is DEAD."""
    entries = _entries(errors)
    states = [entry["verdict"] for entry in entries if entry.get("verdict") in _VERDICTS]
    hooks = [entry for entry in entries if isinstance(entry.get("hook_of"), dict)]
    # The handler's own error. Entries of failed hooks may have pushed it out of the column, and repeat the error.
    lost: dict[str, Any] = hooks[-1]["hook_of"] if hooks else {}
    own = next((entry for entry in reversed(entries) if "hook_of" not in entry), lost)
    told, attempt = Description.read(own), own.get("attempt")
    error = HandlerFailed(
        told.type or UNKNOWN.type, told.message, told.traceback, attempt if isinstance(attempt, int) else None
    )
    return Verdict(State(states[-1]) if states else State.DEAD, error, len(hooks))


def _entries(errors: str) -> list[dict[str, Any]]:
    """The entries of the column, without values that were written by hand."""
    try:
        return [entry for entry in _list.decode(errors) if isinstance(entry, dict)]
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        return []


def describe(
    error: BaseException | Description,
    now: datetime,
    attempt: int,
    *,
    verdict: State | None = None,
    hook_of: Verdict | None = None,
    redact: Redact = keep_all,
) -> str:
    """An entry of the ``errors`` column: time, type, message, short traceback, attempt."""
    told = error if type(error) is Description else Description.of(cast(BaseException, error), redact)
    return _entry(told, now, attempt, verdict, hook_of)


def is_free(error: BaseException) -> bool:
    """True if the error says that the run uses up no attempt."""
    try:
        return issubclass(type(error), RetryAfter) and not error.count_attempt  # type: ignore[attr-defined]  # RetryAfter has one
    except BaseException:  # a subclass that cannot say
        return False


def next_try(
    error: BaseException, attempts: int, now: datetime, policy: RetryPolicy, cap: timedelta, redact: Redact
) -> datetime:
    """The time of the retry after ``attempts`` failed runs, of which the last raised ``error``. Never raises."""
    try:
        return _wanted(error, attempts, now, policy, cap)
    except OverflowError:
        return datetime.max
    except BaseException as broken:
        # A backoff callable or a delay that raises must not lose the row that failed.
        key = (type_name(error), type_name(broken))
        if _flood.admits(key, logging.ERROR):
            _flood.log(
                key, logging.ERROR, "cannot tell when to retry after %s; the default backoff applies: %s at %s",
                log_text(error, redact), log_text(broken, redact), place_of(broken), error_type=type_name(broken),
            )  # fmt: skip
        return now + RetryPolicy().wait_after(max(attempts, 1), error, cap)


def _wanted(error: BaseException, attempts: int, now: datetime, policy: RetryPolicy, cap: timedelta) -> datetime:
    """The moment of the next try, by the error or else by the policy. Both may give any value."""
    if not issubclass(type(error), RetryAfter):
        return now + policy.wait_after(max(attempts, 1), error, cap)
    wish: Any = error
    if wish.at is None:
        return now + parse_duration(wish.delay, key="RetryAfter.delay")
    return max(_plain(wish.at), EPOCH)  # dispatch reads due rows from the epoch on


def _plain(moment: datetime) -> datetime:
    """A moment as naive UTC, and as a plain ``datetime``, because a subclass may behave in any way."""
    try:
        naive = naive_utc(moment)
    except OverflowError:  # within a day of the calendar's end, where the zone does not matter
        naive = moment.replace(tzinfo=None)
    return datetime(
        naive.year, naive.month, naive.day, naive.hour, naive.minute, naive.second, naive.microsecond
    )  # fmt: skip


def _entry(
    told: Description,
    now: datetime | None = None,
    attempt: int | None = None,
    verdict: State | None = None,
    hook_of: Verdict | None = None,
    ran: float | None = None,
) -> str:
    time = None if now is None else now.isoformat(timespec="microseconds")
    texts = {"type": told.type, "message": told.message, "traceback": told.traceback}
    entry: dict[str, Any] = {"time": time, **texts, "attempt": attempt}
    if ran is not None:
        entry["ran"] = round(ran, 6)
    if verdict is not None:
        entry["verdict"] = verdict
    if hook_of is not None:
        of = hook_of.error
        entry["verdict"] = hook_of.state
        entry["hook_of"] = {
            "type": of.type, "message": of.message, "traceback": of.traceback, "attempt": of.attempt,
        }  # fmt: skip
    return msgspec.json.encode(entry).decode()
