"""An outbox in memory, a movable clock, and the committed events.

The outbox in memory is a normal outbox on SQLite: same statements, same semantics, no server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from outboxio.errors import DrainTimeout, InvalidEvent, SettingsError
from outboxio.handlers.registration import Around
from outboxio.model.event import type_names
from outboxio.model.payloads.classes import AnyEvent, decoder_of
from outboxio.model.payloads.fields import field_names
from outboxio.operations.arguments import time_argument
from outboxio.outbox import Drained, Outbox
from outboxio.runs.failure_classifier import joined, listening
from outboxio.settings import Settings
from outboxio.support.clock import utc_now
from outboxio.support.duration import parse_duration

E = TypeVar("E", bound=AnyEvent)


class MovableClock:
    """A clock that only moves when a test advances it: ``Outbox(..., clock=clock)``.

    Times are naive UTC; aware times are converted. The clock starts at ``start``, by default now.

    Example::

        clock = MovableClock(datetime(2026, 1, 1))
        clock.advance(timedelta(minutes=5))      # or 300, or "5m"
        assert clock.now() == datetime(2026, 1, 1, 0, 5)
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._now = utc_now() if start is None else time_argument(start, "start")

    def now(self) -> datetime:
        """Return the clock's time."""
        return self._now

    def __call__(self) -> datetime:
        return self._now

    def advance(self, delta: timedelta | float | str) -> datetime:
        """Move the clock forward and return the new time."""
        duration = parse_duration(delta, key="advance")
        try:
            self._now += duration
        except OverflowError:
            raise SettingsError("advance", delta, f"a duration that keeps {self._now} within the calendar") from None
        return self._now

    def set(self, moment: datetime) -> None:
        """Set the clock, forward or back."""
        self._now = time_argument(moment, "moment")


@asynccontextmanager
async def memory_outbox(
    *,
    namespace: str = "test",
    settings: Settings | None = None,
    clock: MovableClock | None = None,
    resources: Any = None,
    around: Around | None = None,
) -> AsyncGenerator[Outbox]:
    """Open an outbox in memory with all tables, and close it after the block. Handlers run when you call ``drain()``.

    Events are validated at ``emit`` even if the setting ``validate_events`` is off.

    Example::

        async with memory_outbox(clock=clock) as outbox:
            outbox.include(handlers)
            await outbox.executor.execute(DepositMoney(wallet_id, Decimal(10)))
            await outbox.drain()
            assert mailer.sent == [wallet_id]
    """
    checking = replace(settings or Settings(), validate_events=True)
    async with Outbox(
        "sqlite://", namespace=namespace, settings=checking, clock=clock, resources=resources, around=around
    ) as outbox:
        await outbox.migrate()
        yield outbox


async def emitted(outbox: Outbox, event_type: type[E]) -> Sequence[E]:
    """Return the committed events of a class in this outbox's namespace, oldest first.

    Example::

        assert await emitted(outbox, MoneyDeposited) == [MoneyDeposited(wallet_id, Decimal(10))]
    """
    payloads = await outbox.admin.payloads(sorted(type_names(event_type)))
    return list(map(decoder_of(event_type), payloads))


async def expect_event(outbox: Outbox, event_type: type[E], **fields: Any) -> E:
    """Return the only committed event of a class with these field values, or raise ``AssertionError`` with all of them.

    Example::

        event = await expect_event(outbox, MoneyDeposited, wallet_id=wallet_id)
        assert event.amount == Decimal(10)
    """
    unknown = fields.keys() - field_names(event_type)
    if unknown:
        raise InvalidEvent(f"expect_event({event_type.__name__})", f"has no field {sorted(unknown)[0]!r}")
    there = await emitted(outbox, event_type)
    matching = [e for e in there if all(getattr(e, name) == value for name, value in fields.items())]
    if len(matching) != 1:
        values = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        listed = "\n  ".join(map(repr, there)) or "(none)"
        raise AssertionError(
            f"expected one {event_type.__name__}({values}), found {len(matching)}; committed events:\n  {listed}"
        )
    return matching[0]


class Drain(Protocol):
    """The type of the fixture ``outbox_drain``, for annotations: :func:`drain` of the test's outbox.

    Example::

        async def test_a_payment_is_receipted(outbox_drain: Drain) -> None:
            await outbox_drain()
    """

    async def __call__(self, timeout: float | str | None = "10s") -> Drained: ...


async def drain(outbox: Outbox, timeout: timedelta | float | str | None = "10s") -> Drained:
    """Drain the outbox and raise the exceptions of handlers, so that a failing ``assert`` in a handler fails the test.

    The drain finishes first, and failed notifications are retried later as usual. Then the exception of the failed run
    is raised with its traceback, or an ``ExceptionGroup`` if several failed. Failures returned by batch handlers and
    failures of hooks are raised as well. To test a handler that should fail, use ``outbox.drain()`` and check its
    numbers.

    Raises :class:`DrainTimeout` after ``timeout`` (10 s by default, ``None``: no limit), caused by the failures so far.

    Example::

        await outbox.executor.execute(DepositMoney(wallet_id, Decimal(10)))
        assert (await drain(outbox)).succeeded == 1
    """
    with listening(outbox) as failures:
        try:
            drained = await outbox.drain(timeout)
        except DrainTimeout as error:
            raise error from joined(failures) or error.__cause__
    failure = joined(failures)
    if failure is not None:
        raise failure
    return drained
