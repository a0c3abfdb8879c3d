"""Decorators that register your own classes as events and actions, and functions as upcasters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from outboxio.errors import RegistrationError
from outboxio.model.action import Retries, as_entries, is_action, make_action_class
from outboxio.model.event import (
    is_event_class,
    make_event_class,
    name_class,
    type_name,
    upcasters_of,
    version_of,
)
from outboxio.model.payloads.classes import KINDS, AnyEvent, Upcast, is_supported
from outboxio.model.payloads.fields import unfit_field
from outboxio.support.text import briefly

# pyright applies decorators before it recognizes the class as a dataclass, so any class is accepted here.
C = TypeVar("C", bound=type[Any])
U = TypeVar("U", bound=Upcast)


@overload
def event(cls: C, /) -> C: ...


@overload
def event(type_name: str | None = None, *, aliases: Iterable[str] = (), version: int = 1) -> Callable[[C], C]: ...


def event(type_name: Any = None, *, aliases: Iterable[str] = (), version: int = 1) -> Any:
    """Make a Pydantic model, a dataclass, an attrs class or a msgspec struct an event class.

    Events of the class are emitted, stored and handled like those of an :class:`Event`. Rows store the simple name of
    the class, or ``type_name``. After renaming a class, list its old names in ``aliases``. Increase ``version`` when
    the structure of the payload changes (see :func:`upcaster`). Apply this decorator above the one that makes the class
    a dataclass. Subclasses must be decorated separately.

    Raises :class:`RegistrationError` for an unsupported class, for a class that is already decorated, and for a field
    that JSON cannot represent; :class:`InvalidEvent` for a name or a version that cannot be stored.

    Example::

        @outboxio.event("order-paid", version=2)
        class OrderPaid(BaseModel):
            order_id: UUID
            amount: Decimal
    """
    if isinstance(type_name, type):
        return _decorated(type_name, None, aliases, version)

    def decorate(cls: C) -> C:
        return _decorated(cls, type_name, aliases, version)

    return decorate


def _decorated(cls: C, name: str | None, aliases: Iterable[str], version: int) -> C:
    _refuse_class(cls, "event", is_event_class)
    reason = unfit_field(cls)
    if reason is not None:
        raise RegistrationError(f"events of {_where(cls)} cannot be stored and read: {reason}")
    name_class(cls, name, aliases)
    make_event_class(cls, version)
    return cls


@overload
def action(cls: C, /) -> C: ...


@overload
def action(type_name: str | None = None, *, retry: Retries = ()) -> Callable[[C], C]: ...


def action(type_name: Any = None, *, retry: Retries = ()) -> Any:
    """Make a Pydantic model, a dataclass, an attrs class or a msgspec struct an action: its fields are the parameters.

    The class must have ``async def perform(self, tx)``, like an :class:`Action`. ``type_name`` is the stored name of
    the action, by default the name of the class. ``retry`` determines which failures are retried.

    Raises :class:`RegistrationError` for an unsupported class, a class without ``perform``, and a class that is already
    decorated.

    Example::

        @outboxio.action(retry=Retry(on=SeatTaken, attempts=5))
        class BookSeat(BaseModel):
            seat: str

            async def perform(self, tx: Transaction) -> None:
                tx.emit(SeatBooked(seat=self.seat))
    """
    if isinstance(type_name, type):
        return _decorated_action(type_name, None, retry)

    def decorate(cls: C) -> C:
        return _decorated_action(cls, type_name, retry)

    return decorate


def _decorated_action(cls: C, name: str | None, retry: Retries) -> C:
    _refuse_class(cls, "action", is_action)
    if not inspect.iscoroutinefunction(getattr(cls, "perform", None)):
        raise RegistrationError(f"{_where(cls)} has no method `async def perform(self, tx)`")
    name_class(cls, name, ())
    make_action_class(cls, as_entries(retry))
    return cls


def upcaster(cls: type[AnyEvent], *, from_version: int) -> Callable[[U], U]:
    """Register a function that converts the stored JSON object of ``from_version`` to the next version.

    The function gets the object as a dict of JSON values, and returns the converted dict. Rows of older versions pass
    through all functions in turn before they are decoded; the rows themselves do not change. Register the functions
    before the handlers.

    Raises :class:`RegistrationError` for a class that is not an event class, for a version without a next version, and
    for a second function of the same version.

    Example::

        class OrderPaid(Event, version=2):
            order_id: UUID
            amount: Decimal
            currency: str

        @outboxio.upcaster(OrderPaid, from_version=1)
        def add_currency(stored: dict[str, Any]) -> dict[str, Any]:
            return {**stored, "currency": "EUR"}
    """
    if not is_event_class(cls):
        raise RegistrationError(f"upcaster of {briefly(cls)}: expected an event class")
    name, version = type_name(cls), version_of(cls)
    start: Any = from_version  # callers may not be typed
    if not isinstance(start, int) or isinstance(start, bool) or not 1 <= start < version:
        raise RegistrationError(
            f"upcaster of {name}: from_version is {briefly(start)}, and the class has version {version}; expected a "
            "whole number from 1 to the version before that, or a larger version= of the class"
        )

    def register(function: U) -> U:
        upcasters = upcasters_of(cls)
        other = upcasters.setdefault(from_version, function)
        if other is not function:
            raise RegistrationError(f"{name} has two upcasters from version {from_version}: {other!r} and {function!r}")
        return function

    return register


def _refuse_class(cls: Any, kind: str, is_one: Callable[[Any], bool]) -> None:
    if not isinstance(cls, type):
        raise RegistrationError(f"@outboxio.{kind} decorates a class, not {briefly(cls)}")
    if is_one(cls):
        raise RegistrationError(f"{_where(cls)} is already an {kind}; remove @outboxio.{kind}, or decorate it once")
    if not is_supported(cls):
        raise RegistrationError(
            f"@outboxio.{kind} is for {KINDS}, and {_where(cls)} is none of them; if another decorator makes it one, "
            f"put @outboxio.{kind} above that decorator"
        )


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
