"""Errors about events that cannot be stored."""

from __future__ import annotations

from typing import Any

from outboxio.errors.root import OutboxError


class InvalidEvent(OutboxError):
    """An event, the parameters or the names of an event cannot be stored. No row was written.

    ``subject`` is the refused object (``"event MoneyDeposited"``), ``reason`` the cause. ``without_value`` is the
    message for the log, without values of the event that the reason quotes.
    """

    def __init__(self, subject: str, reason: str, *, logged: str | None = None) -> None:
        self.subject = subject
        self.reason = reason
        self.without_value = f"{subject}: {reason if logged is None else logged}"
        super().__init__(f"{subject}: {reason}")


class AmbiguousTypeName(InvalidEvent):
    """Two different classes share an event type name."""

    def __init__(self, name: str, first: type, second: type) -> None:
        self.name = name
        self.first = first
        self.second = second
        super().__init__(
            f"event type {name!r}",
            f"{_where(first)} and {_where(second)} share this name, so their rows could not be told apart; "
            f'give one of them another: class {second.__name__}(Event, type_name="...")',
        )


class TooManyHops(OutboxError):
    """A chain of events that cause events is longer than the setting ``max_hops``."""

    def __init__(self, hops: int, max_hops: int, handler_name: str) -> None:
        self.hops = hops
        self.max_hops = max_hops
        self.handler_name = handler_name
        super().__init__(
            f"handler {handler_name!r} would cause hop {hops} of one chain of events; max_hops is {max_hops}. "
            "Two handlers probably cause each other's events; break the circle, or raise max_hops"
        )


def _where(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
