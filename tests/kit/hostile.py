"""Exceptions that raise when code reads their class, text, notes, cause or fields.

Each exception is created fresh, because raising leaves traces on an exception.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from outboxio import RetryAfter


class NoNotes(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


class NoAttributes(Exception):
    """Not even ``__class__`` can be read, so isinstance() raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class OtherClass(Exception):
    @property  # type: ignore[misc]  # the odd value is the point
    def __class__(self) -> type:
        raise RuntimeError("no class")


class NoText(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class OddText(str):
    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __len__(self) -> int:
        raise RuntimeError("no length")


class TextOfItsOwn(Exception):
    def __str__(self) -> str:
        return OddText("odd")

    __repr__ = __str__


class NoTruth(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


class Falsy(Exception):
    def __len__(self) -> int:
        return 0


class Metaclass(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__name__", "__module__"):
            raise RuntimeError(f"no {name}")
        return super().__getattribute__(name)


class NoName(Exception, metaclass=Metaclass):
    pass


class Unequal(Exception):
    __hash__ = None  # type: ignore[assignment]  # the odd value is the point

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("equal to nothing, and unequal to nothing")


class Forgetful(RetryAfter):
    def __init__(self) -> None: ...


class Undecided(RetryAfter):
    def __init__(self) -> None:
        super().__init__(1)

    def __getattribute__(self, name: str) -> Any:
        if name in ("delay", "at", "count_attempt"):
            raise RuntimeError(f"no {name}")
        return super().__getattribute__(name)


def odd_syntax_error() -> SyntaxError:
    error = SyntaxError("odd")
    error.lineno, error.offset, error.text, error.filename = "x", object(), 7, []  # type: ignore[assignment]
    return error


def changed(**attributes: Any) -> RetryAfter:
    """A ``RetryAfter`` that was changed after its creation."""
    error = RetryAfter(1)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


class Moment(datetime.datetime):
    """A missing timestamp, like ``NaT`` of pandas."""

    def __getattribute__(self, name: str) -> Any:
        return float("nan") if name in ("year", "month", "day") else super().__getattribute__(name)


class NoZone(datetime.tzinfo):
    def utcoffset(self, dt: datetime.datetime | None) -> datetime.timedelta:
        raise RuntimeError("no offset")


WEST = datetime.timezone(datetime.timedelta(hours=-5))
EAST = datetime.timezone(datetime.timedelta(hours=5))

DESCRIBED_BADLY: tuple[Callable[[], BaseException], ...] = (
    NoNotes, NoAttributes, OtherClass, NoText, TextOfItsOwn, NoTruth, Falsy, NoName, Unequal, odd_syntax_error,
)  # fmt: skip
RETRIED_BADLY: tuple[Callable[[], BaseException], ...] = (
    Forgetful,
    Undecided,
    lambda: changed(delay=None, at=datetime.time(12)),
    lambda: changed(delay=None, at=datetime.date(2030, 1, 1)),
    lambda: changed(delay=None, at="tomorrow"),
    lambda: changed(delay=None, at=object()),
    lambda: changed(delay=None, at=Moment(2030, 1, 1)),
    lambda: changed(delay=None, at=datetime.datetime(2030, 1, 1, tzinfo=NoZone())),
    lambda: changed(delay=-5),
    lambda: changed(delay="soon"),
    lambda: changed(delay=float("nan")),
    lambda: changed(delay=datetime.timedelta.max),
    lambda: changed(delay=datetime.timedelta.min),
    lambda: changed(count_attempt=NoTruth()),
    lambda: RetryAfter(datetime.timedelta.max),
    lambda: RetryAfter(at=datetime.datetime.max),
    lambda: RetryAfter(at=datetime.datetime.min),
    lambda: RetryAfter(at=datetime.datetime.max.replace(tzinfo=WEST)),
    lambda: RetryAfter(at=datetime.datetime.min.replace(tzinfo=EAST)),
)
HOSTILE = (*DESCRIBED_BADLY, *RETRIED_BADLY)


def name_of(make: Callable[[], BaseException]) -> str:
    """The test id of a value."""
    return "NoName" if make is NoName else getattr(make, "__name__", "odd").strip("<>")


def backoff_that(returns: Any) -> Callable[[int, BaseException], Any]:
    def backoff(attempts: int, error: BaseException) -> Any:
        if isinstance(returns, BaseException):
            raise returns
        return returns

    return backoff


class Sum:
    """A value whose sums are values of a different kind."""

    def __radd__(self, other: object) -> str:
        return "tomorrow"


BACKOFFS = (
    RuntimeError("broken"), KeyboardInterrupt(), OverflowError(), None, 30, "30s", float("nan"), object(), Sum(),
    datetime.timedelta.max, datetime.timedelta.min, datetime.timedelta(0), datetime.timedelta(seconds=-1),
)  # fmt: skip
"""What a backoff may raise or return."""
