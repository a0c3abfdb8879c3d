"""The options of handlers. Invalid values and combinations are refused at registration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from msgspec import Struct
from msgspec.structs import force_setattr

from outboxio.errors import ConfigurationError, HandlerFailed, RegistrationError, SettingsError
from outboxio.handlers.rate import Rate, conflicting_rates, rate_of
from outboxio.model.lock_name import MAX_PARTITIONS
from outboxio.model.retry import Backoff, RetryPolicy
from outboxio.support.clock import naive_utc
from outboxio.support.duration import OptionalDuration, default_duration, parse_duration
from outboxio.support.signature import is_async, missing_for
from outboxio.support.text import briefly, nearest

if TYPE_CHECKING:
    from outboxio.model.envelope import EventEnvelope

DeadHook = Callable[["EventEnvelope[Any]", HandlerFailed], Awaitable[None]]
"""A hook for a notification that ends DEAD, or EXPIRED after a failure."""

ALERT_AGE = timedelta(seconds=60)
"""The default of ``alert_age``."""

_SMALLEST, _LARGEST = -(2**31), 2**31 - 1  # the range of the column


class Delivery(StrEnum):
    """The delivery guarantee of a handler if a run fails, or the process dies during a run."""

    AT_LEAST_ONCE = "at_least_once"
    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"


class OnDeadKey(StrEnum):
    """What happens to an ordering key when one of its rows ends DEAD or EXPIRED."""

    PARK = "park"
    """The later rows of the key wait until an operator retries or skips the row."""
    CONTINUE = "continue"
    """The next row of the key starts."""


AnyDelivery = Delivery | Literal["at_least_once", "transactional", "at_most_once"]
AnyOnDeadKey = OnDeadKey | Literal["park", "continue"]
AnyPartitions = int | Literal["auto"]
Since = datetime | Literal["now"]
"""The start date of a handler: an ``event_date``, or ``"now"`` for the handler's first announcement."""


class SingleKeywords(TypedDict, total=False):
    """The options of a handler that is called for each event alone."""

    retry: RetryPolicy | Backoff | None
    timeout: timedelta | float | str | None
    concurrency: int | None
    delivery: AnyDelivery
    on_dead: DeadHook | None
    ordered: bool
    on_dead_key: AnyOnDeadKey | None
    priority: int
    relay: bool
    since: Since | None
    partitions: AnyPartitions
    total_concurrency: int | None
    rate: Rate | str | None
    rate_per_key: bool
    alert_age: timedelta | float | str
    trace: bool
    raw: bool


class HandlerKeywords(SingleKeywords, total=False):
    """The options of a handler, as keywords of ``outbox.handler`` or attributes of a class."""

    batch: Batch | None


class HandlerOptions(Struct, frozen=True, kw_only=True):
    """The validated options. ``None`` means the value of the outbox's settings."""

    retry: RetryPolicy
    timeout: timedelta | None
    concurrency: int | None
    delivery: Delivery
    on_dead: DeadHook | None
    ordered: bool
    on_dead_key: OnDeadKey
    batch: Batch | None
    priority: int
    relay: bool
    since: Since | None
    partitions: AnyPartitions
    total_concurrency: int | None
    rate: Rate | None
    rate_per_key: bool
    alert_age: timedelta
    """The age of a due notification at which the overview reports that the handler is behind."""
    trace: bool
    raw: bool
    """True if nothing is decoded: the event of an envelope is the stored JSON, as bytes."""

    @property
    def declared_partitions(self) -> int:
        """The partition count declared in code; 1 if outboxio decides."""
        return 1 if self.partitions == "auto" else self.partitions

    @property
    def most_partitions(self) -> int:
        """The largest partition count that outboxio may choose; 1 if it is fixed, or the handler must not be shared.

        A concurrency of 1 applies to the whole cluster, and a schedule makes a single call.
        """
        single = 1 if self.batch is not None else None
        is_whole = (self.concurrency or single) == 1 or (self.batch is not None and self.batch.schedule is not None)
        if self.partitions != "auto" or is_whole:
            return 1
        return min(MAX_PARTITIONS, self.total_concurrency or MAX_PARTITIONS)


_IN_BATCH = "it is part of the batch, as in batch=Batch({}=...)"
MISPLACED: Mapping[str, str] = {
    "size": _IN_BATCH.format("size"),
    "max_wait": _IN_BATCH.format("max_wait"),
    "schedule": _IN_BATCH.format("schedule"),
    "strict_priority": "it belongs to the event, as in class MoneyDeposited(Event, strict_priority=True)",
    "ordering_key": "it belongs to the event, as in tx.emit(event, ordering_key=...); the handler has ordered=True",
    "max_attempts": "it is part of the retry policy, as in retry=RetryPolicy(max_attempts=...)",
    "backoff": "it is part of the retry policy, as in retry=RetryPolicy(backoff=...)",
    "retention": "it is part of the retry policy, as in retry=RetryPolicy(retention=...)",
}
"""Options that belong elsewhere, with the correct usage."""

NEVER_A_USERS_OWN = MISPLACED.keys() - {"size", "ordering_key", "backoff", "retention"}
"""Misplaced options that a handler class has as an attribute only by mistake."""


def checked_options(name: str, where: str, given: HandlerKeywords) -> HandlerOptions:
    """Return the validated options. Raises :class:`RegistrationError`, which names the invalid value or combination."""
    refuse = _Refuse(name, where)
    for option in given.keys() - HandlerKeywords.__annotations__.keys():
        meant = nearest(option, HandlerKeywords.__annotations__)
        hint = f"did you mean {meant}?" if meant else f"there is {', '.join(HandlerKeywords.__annotations__)}"
        refuse(f"has {option}=: {MISPLACED.get(option, f'there is no such option; {hint}')}")
    options = HandlerOptions(
        retry=_policy(given.get("retry"), refuse),
        timeout=_timeout(given.get("timeout"), refuse),
        concurrency=_at_least_one("concurrency", given.get("concurrency"), refuse),
        delivery=_one_of(Delivery, "delivery", given.get("delivery", Delivery.AT_LEAST_ONCE), refuse),
        on_dead=checked_hook(given.get("on_dead"), f"on_dead of handler {name!r}"),
        ordered=_switch("ordered", given.get("ordered", False), refuse),
        on_dead_key=_one_of(OnDeadKey, "on_dead_key", given.get("on_dead_key") or OnDeadKey.PARK, refuse),
        batch=_batch(given.get("batch"), refuse),
        priority=_priority(given.get("priority", 0), refuse),
        relay=_switch("relay", given.get("relay", False), refuse),
        since=_since(given.get("since"), refuse),
        partitions=_partitions(given.get("partitions", "auto"), refuse),
        total_concurrency=_at_least_one("total_concurrency", given.get("total_concurrency"), refuse),
        rate=rate_of(given.get("rate"), refuse),
        rate_per_key=_switch("rate_per_key", given.get("rate_per_key", False), refuse),
        alert_age=_duration("alert_age", given.get("alert_age", ALERT_AGE), refuse),
        trace=_switch("trace", given.get("trace", True), refuse),
        raw=_switch("raw", given.get("raw", False), refuse),
    )
    for is_given, why in _conflicts(options, given):
        if is_given:
            refuse(f"has {why}")
    return options


def _conflicts(options: HandlerOptions, given: HandlerKeywords) -> list[tuple[bool, str]]:
    once = options.delivery is Delivery.AT_MOST_ONCE
    batch, partitions, total = options.batch, options.declared_partitions, options.total_concurrency
    return [
        *conflicting_rates(options.rate, options.rate_per_key, options.ordered, batch),
        (
            once and given.get("retry") is not None,
            f"delivery='at_most_once' and retry={given.get('retry')!r}: a handler that runs at most once is never "
            "retried; remove one of them",
        ),
        (
            once and batch is not None,
            "delivery='at_most_once' and batch=: a failed call is split, and its rows run again; remove one of them",
        ),
        (
            options.ordered and batch is not None and batch.schedule is not None,
            "ordered=True and batch=Batch(schedule=...): a call contains only the first events of each key, so later "
            "events of the key would wait for later scheduled times; remove one of them",
        ),
        (
            given.get("on_dead_key") is not None and not options.ordered,
            f"on_dead_key={given.get('on_dead_key')!r} without ordered=True: only the keys of an ordered handler can "
            "be parked; add ordered=True, or remove it",
        ),
        (
            partitions > 1 and batch is not None and batch.schedule is not None,
            f"partitions={partitions} and batch=Batch(schedule=...): each process would produce a report of its part "
            "of the events; remove partitions",
        ),
        (
            total is not None and total < partitions,
            f"total_concurrency={total} and partitions={partitions}: each partition needs at least one run, so the "
            f"events of some partitions would never run; raise total_concurrency to {partitions} or more, or use fewer "
            "partitions",
        ),
    ]  # fmt: skip


class _Refuse:
    """Raises :class:`RegistrationError` with the handler's name."""

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def __call__(self, what: str) -> None:
        raise RegistrationError(f"handler {self._name!r} {what} ({self._where})")


def checked_hook(hook: DeadHook | None, subject: str) -> DeadHook | None:
    """Return the validated hook. Raises :class:`RegistrationError`, naming ``subject``, if it is invalid."""
    if hook is None:
        return None
    if not is_async(hook):
        raise RegistrationError(f"{subject} is {briefly(hook)}; expected an async function of (envelope, error)")
    missing = missing_for(hook, 2)
    if missing is not None:
        raise RegistrationError(f"{subject} is called with (envelope, error), and {briefly(hook)} {missing}")
    return hook


# Each function below validates an option. Callers may not be typed, so every value is checked.


def _policy(retry: Any, refuse: _Refuse) -> RetryPolicy:
    if retry is None:
        return RetryPolicy()
    if not (isinstance(retry, RetryPolicy) or callable(retry)):
        refuse(f"has retry={retry!r}; expected a RetryPolicy or a callable of (attempts, exception)")
    policy = retry if isinstance(retry, RetryPolicy) else RetryPolicy(backoff=cast(Backoff, retry))
    missing = None if policy.backoff is None else missing_for(policy.backoff, 2)
    if missing is not None:
        refuse(f"has retry={retry!r}, which is called with (attempts, exception) and {missing}")
    return policy


def _timeout(timeout: Any, refuse: _Refuse) -> timedelta | None:
    return None if timeout is None else _duration("timeout", timeout, refuse)


def _duration(option: str, value: Any, refuse: _Refuse) -> timedelta:
    try:
        duration = parse_duration(value, key=option)
    except SettingsError as error:
        refuse(f"has {option}={value!r}; expected {error.expected}")
        raise
    if not duration:
        refuse(f"has {option}={value!r}; expected a duration longer than zero")
    return duration


def _at_least_one(option: str, value: Any, refuse: _Refuse) -> int | None:
    if value is not None and (not _is_number(value) or value < 1):
        refuse(f"has {option}={value!r}; expected 1 or more")
    number: int | None = value
    return number


def _partitions(partitions: Any, refuse: _Refuse) -> AnyPartitions:
    if partitions == "auto":
        return "auto"
    if not _is_number(partitions) or not 1 <= partitions <= MAX_PARTITIONS:
        refuse(f"has partitions={partitions!r}; expected 'auto', or a whole number from 1 to {MAX_PARTITIONS}")
    number: int = partitions
    return number


def _priority(priority: Any, refuse: _Refuse) -> int:
    if not _is_number(priority) or not _SMALLEST <= priority <= _LARGEST:
        refuse(f"has priority={priority!r}; expected a whole number from {_SMALLEST} to {_LARGEST}, lower runs first")
    number: int = priority
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _switch(option: str, value: Any, refuse: _Refuse) -> bool:
    if not isinstance(value, bool):
        refuse(f"has {option}={value!r}; expected True or False")
    return bool(value)


def _batch(batch: Any, refuse: _Refuse) -> Batch | None:
    if batch is not None and not isinstance(batch, Batch):
        refuse(f"has batch={batch!r}; expected a Batch, as in batch=Batch(size=500)")
    chosen: Batch | None = batch
    return chosen


def _since(since: Any, refuse: _Refuse) -> Since | None:
    if since is None or since == "now":
        return cast("Since | None", since)
    if not isinstance(since, datetime):
        refuse(
            f"has since={since!r}; expected a datetime (naive UTC, or aware), as in since=datetime(2026, 1, 31), or "
            "'now' for events from the handler's first start on. A duration would mean a different time at every start"
        )
    return naive_utc(cast(datetime, since))


def _one_of(kind: Any, option: str, value: Any, refuse: _Refuse) -> Any:
    try:
        return kind(value)
    except ValueError:
        refuse(f"has {option}={value!r}; expected one of {', '.join(repr(str(member)) for member in kind)}")


# --- batches: handlers that get many events in a call, at once or at set times --------------------


DEFAULT_WAIT = timedelta(seconds=1)
LARGEST_BATCH = 10_000


class Batch(Struct, frozen=True, kw_only=True):
    """How the events of a handler are grouped into calls.

    ``size``: the maximum number of events per call, 1 to 10,000. ``max_wait``: how long an event waits for a full call
    (default: 1 s; zero: no wait). ``schedule``: a cron expression with five fields, in UTC, instead of ``max_wait``:
    events wait for the first scheduled time after the oldest event was recorded. If no process was running at that
    time, the call is made at the next start. Needs ``outboxio[cron]``.

    Raises :class:`~outboxio.SettingsError` for an invalid value or combination.

    Example::

        @outbox.handler(MoneyDeposited, name="daily-report", batch=Batch(size=1000, schedule="0 0 * * *"))
        async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None: ...
    """

    size: int = 500
    max_wait: OptionalDuration = default_duration(None)
    schedule: str | None = None

    def __post_init__(self) -> None:
        size: Any = self.size  # callers may not be typed
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_BATCH:
            raise SettingsError("Batch.size", size, f"a whole number from 1 to {LARGEST_BATCH}")
        if self.max_wait is not None:
            if self.schedule is not None:
                raise SettingsError(
                    "Batch.max_wait", self.max_wait, "no max_wait together with schedule, which sets the time"
                )
            force_setattr(self, "max_wait", parse_duration(self.max_wait, key="Batch.max_wait"))
        if self.schedule is not None:
            next_time_of(self.schedule)

    @property
    def longest_wait(self) -> float:
        """The seconds that an event waits for a full call, at most."""
        return (DEFAULT_WAIT if self.max_wait is None else self.max_wait).total_seconds()


def next_time_of(schedule: str) -> Callable[[datetime], datetime]:
    """Return a function from a time to the next time of a cron expression."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise ConfigurationError(
            f"Batch.schedule is {schedule!r}, but the library for cron expressions is not installed: "
            "pip install 'outboxio[cron]'"
        ) from error

    def next_after(time: datetime) -> datetime:
        try:
            return next(CronSim(schedule, time))
        except StopIteration:
            raise SettingsError("Batch.schedule", schedule, "a schedule with at least one time in 50 years") from None

    try:
        if len(schedule.split()) != 5:
            raise CronSimError("fields")
        next_after(datetime(2000, 1, 1))
    except (CronSimError, AttributeError):
        raise SettingsError(
            "Batch.schedule", schedule,
            "a cron expression of five fields: minute, hour, day of the month, month, day of the week",
        ) from None  # fmt: skip
    return next_after


LONGEST_UNSEEN = timedelta(minutes=1)
"""The longest time between two announcements of a process: a subscription deleted by mistake is soon back."""

OLDER_FOR = 2 * LONGEST_UNSEEN
"""A process of an older version that still runs has announced its handlers within this time."""


class Subscription(Struct, frozen=True, kw_only=True):
    """A row of ``subscriptions``: a handler subscribes to an event type, or to all events on a topic.

    Either ``event_type`` or ``topic`` is set; the second value is the empty string.
    """

    handler_name: str
    event_type: str = ""
    topic: str = ""
    aliases: tuple[str, ...] = ()
    priority: int = 0
    ordered: bool = False
