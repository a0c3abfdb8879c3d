"""What a handler may ask for, and which wishes make no sense together: those are refused when it is registered."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypedDict, cast

from msgspec import Struct

from outboxio.backoff import Backoff, RetryPolicy
from outboxio.batch import Batch
from outboxio.duration import parse_duration
from outboxio.errors import HandlerFailed, RegistrationError, SettingsError

if TYPE_CHECKING:
    from outboxio.envelope import EventEnvelope

DeadHook = Callable[["EventEnvelope[Any]", HandlerFailed], Awaitable[None]]
"""What is called when a notification ends DEAD, or EXPIRED after a failure."""

_SMALLEST, _LARGEST = -(2**31), 2**31 - 1  # what the column of a priority holds


class Delivery(StrEnum):
    """What a handler may count on when it fails, or its process dies, half-way."""

    AT_LEAST_ONCE = "at_least_once"
    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"


class OnDeadKey(StrEnum):
    """What becomes of an ordering key when one of its rows ends DEAD or EXPIRED."""

    PARK = "park"
    """The rows behind it wait until an operator retries or skips it."""
    CONTINUE = "continue"
    """The next one starts."""


class HandlerKeywords(TypedDict, total=False):
    """The options of a handler, as a user writes them: keywords of ``outbox.handler``, attributes of a class."""

    retry: RetryPolicy | Backoff | None
    timeout: timedelta | float | str | None
    concurrency: int | None
    delivery: Delivery | str
    on_dead: DeadHook | None
    ordered: bool
    on_dead_key: OnDeadKey | str | None
    batch: Batch | None
    priority: int
    relay: bool


class HandlerOptions(Struct, frozen=True, kw_only=True):
    """The same, checked. ``None`` leaves a value to the settings of the outbox."""

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


_IN_BATCH = "it is part of the batch, as in batch=Batch({}=...)"
MISPLACED: Mapping[str, str] = {
    "size": _IN_BATCH.format("size"),
    "max_wait": _IN_BATCH.format("max_wait"),
    "schedule": _IN_BATCH.format("schedule"),
    "strict_priority": "it belongs to the event, as in class MoneyDeposited(Event, strict_priority=True)",
    "ordering_key": "it belongs to the event, as in tx.emit(event, ordering_key=...); the handler says ordered=True",
    "max_attempts": "it is part of the retry policy, as in retry=RetryPolicy(max_attempts=...)",
    "backoff": "it is part of the retry policy, as in retry=RetryPolicy(backoff=...)",
    "retention": "it is part of the retry policy, as in retry=RetryPolicy(retention=...)",
}
"""Options of something else, and where they belong."""

NEVER_A_USERS_OWN = MISPLACED.keys() - {"size", "ordering_key", "backoff", "retention"}
"""Those that a class has as an attribute only by mistake."""


def checked_options(name: str, where: str, given: HandlerKeywords) -> HandlerOptions:
    """The options if each can be and they make sense together; :class:`RegistrationError` names what does not."""
    refuse = _Refuse(name, where)
    for option in given.keys() - HandlerKeywords.__annotations__.keys():
        close = difflib.get_close_matches(option, HandlerKeywords.__annotations__, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(HandlerKeywords.__annotations__)}"
        refuse(f"has {option}=: {MISPLACED.get(option, f'there is no such option; {hint}')}")
    options = HandlerOptions(
        retry=_policy(given.get("retry"), refuse),
        timeout=_timeout(given.get("timeout"), refuse),
        concurrency=_concurrency(given.get("concurrency"), refuse),
        delivery=_one_of(Delivery, "delivery", given.get("delivery", Delivery.AT_LEAST_ONCE), refuse),
        on_dead=checked_hook(given.get("on_dead"), f"on_dead of handler {name!r}"),
        ordered=_switch("ordered", given.get("ordered", False), refuse),
        on_dead_key=_one_of(OnDeadKey, "on_dead_key", given.get("on_dead_key") or OnDeadKey.PARK, refuse),
        batch=_batch(given.get("batch"), refuse),
        priority=_priority(given.get("priority", 0), refuse),
        relay=_switch("relay", given.get("relay", False), refuse),
    )
    for makes_no_sense, why in _senseless(options, given):
        if makes_no_sense:
            refuse(f"has {why}")
    return options


def _senseless(options: HandlerOptions, given: HandlerKeywords) -> list[tuple[bool, str]]:
    once = options.delivery is Delivery.AT_MOST_ONCE
    batch = options.batch
    return [
        (
            once and given.get("retry") is not None,
            f"delivery='at_most_once' and retry={given.get('retry')!r}: what may run only once is never retried; "
            "leave one of them out",
        ),
        (
            once and batch is not None,
            "delivery='at_most_once' and batch=: a call that fails is split, and its rows run again; leave one of "
            "them out",
        ),
        (
            options.ordered and batch is not None,
            "ordered=True and batch=: an ordered handler gets the next event of a key when the one before is done, "
            "a batch gets many at once; leave one of them out",
        ),
        (
            given.get("on_dead_key") is not None and not options.ordered,
            f"on_dead_key={given.get('on_dead_key')!r} without ordered=True: only the keys of an ordered handler can "
            "be parked; add ordered=True, or leave it out",
        ),
    ]  # fmt: skip


class _Refuse:
    """Raises, naming the handler."""

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def __call__(self, what: str) -> None:
        raise RegistrationError(f"handler {self._name!r} {what} ({self._where})")


def checked_hook(hook: DeadHook | None, subject: str) -> DeadHook | None:
    """The hook if it can be one; :class:`RegistrationError` naming ``subject`` otherwise."""
    if hook is not None and not is_async(hook):
        raise RegistrationError(f"{subject} is {hook!r}; expected an async function of (envelope, error)")
    return hook


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# What follows checks one option each. Callers may not be typed, so every value is looked at.


def _policy(retry: Any, refuse: _Refuse) -> RetryPolicy:
    if retry is None or isinstance(retry, RetryPolicy):
        return retry or RetryPolicy()
    if not callable(retry):
        refuse(f"has retry={retry!r}; expected a RetryPolicy or a callable of (attempts, exception)")
    return RetryPolicy(backoff=cast(Backoff, retry))


def _timeout(timeout: Any, refuse: _Refuse) -> timedelta | None:
    if timeout is None:
        return None
    try:
        duration = parse_duration(timeout, key="timeout")
    except SettingsError as error:
        refuse(f"has timeout={timeout!r}; expected {error.expected}")
        raise
    if not duration:
        refuse(f"has timeout={timeout!r}; expected a duration longer than zero")
    return duration


def _concurrency(concurrency: Any, refuse: _Refuse) -> int | None:
    if concurrency is not None and (not _is_number(concurrency) or concurrency < 1):
        refuse(f"has concurrency={concurrency!r}; expected 1 or more")
    number: int | None = concurrency
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


def _one_of(kind: Any, option: str, value: Any, refuse: _Refuse) -> Any:
    try:
        return kind(value)
    except ValueError:
        refuse(f"has {option}={value!r}; expected one of {', '.join(repr(str(member)) for member in kind)}")
