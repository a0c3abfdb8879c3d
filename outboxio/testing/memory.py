"""An outbox in memory, a clock that a test moves, and the events that were committed.

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
from outboxio.operations.arguments import given_moment
from outboxio.outbox import Drained, Outbox
from outboxio.runs.judge import joined, listening
from outboxio.settings import Settings
from outboxio.support.clock import utc_now
from outboxio.support.duration import parse_duration

E = TypeVar("E", bound=AnyEvent)


class MovableClock:
    """A clock that stands still until a test moves it: ``Outbox(..., clock=clock)``.

    Moments are naive UTC; an aware moment is converted. The clock starts at ``start``, or at the present moment.

    Example::

        clock = MovableClock(datetime(2026, 1, 1))
        clock.advance(timedelta(minutes=5))      # or 300, or "5m"
        assert clock.now() == datetime(2026, 1, 1, 0, 5)
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._now = utc_now() if start is None else given_moment(start, "start")

    def now(self) -> datetime:
        """The moment at which the clock stands."""
        return self._now

    def __call__(self) -> datetime:
        return self._now

    def advance(self, delta: timedelta | float | str) -> datetime:
        """Move the clock on; the new moment."""
        duration = parse_duration(delta, key="advance")
        try:
            self._now += duration
        except OverflowError:
            raise SettingsError(
                "advance", delta, f"a duration that does not lead from {self._now} out of the calendar"
            ) from None
        return self._now

    def set(self, moment: datetime) -> None:
        """Move the clock to a moment, forward or back."""
        self._now = given_moment(moment, "moment")


@asynccontextmanager
async def memory_outbox(
    *,
    namespace: str = "test",
    settings: Settings | None = None,
    clock: MovableClock | None = None,
    resources: Any = None,
    around: Around | None = None,
) -> AsyncGenerator[Outbox]:
    """An outbox in memory with all tables, closed at the end of the block. Handlers run when you call ``drain()``.

    Field values are checked against the field types at each ``emit``, even if the setting ``validate_events`` is off.

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
    """The events of a class that were committed in this outbox's namespace, oldest first.

    Example::

        assert await emitted(outbox, MoneyDeposited) == [MoneyDeposited(wallet_id, Decimal(10))]
    """
    payloads = await outbox.admin.payloads(sorted(type_names(event_type)))
    return list(map(decoder_of(event_type), payloads))


async def expect_event(outbox: Outbox, event_type: type[E], **fields: Any) -> E:
    """The only committed event of a class with these field values. ``AssertionError`` shows all events of the class.

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
        wanted = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        listed = "\n  ".join(map(repr, there)) or "(none)"
        raise AssertionError(
            f"expected one {event_type.__name__}({wanted}), found {len(matching)}; committed were:\n  {listed}"
        )
    return matching[0]


class Drain(Protocol):
    """The type of the fixture ``outbox_drain``, for annotations: :func:`drain` of the outbox of the test.

    Example::

        async def test_a_payment_is_receipted(outbox_drain: Drain) -> None:
            await outbox_drain()
    """

    async def __call__(self, timeout: float | str | None = "10s") -> Drained: ...


async def drain(outbox: Outbox, timeout: timedelta | float | str | None = "10s") -> Drained:
    """``outbox.drain()`` for tests: raises the exceptions of handlers, and gives up instead of hanging a test.

    The drain comes to its end first, and failed notifications are retried later as always. Then the exception of the
    failed run is raised, or an ``ExceptionGroup`` if several runs failed. The exceptions have their tracebacks, so a
    failing ``assert`` in a handler fails the test. Failures that a batch handler returns, and failures of hooks, are
    raised as well. A test of a handler that should fail awaits ``outbox.drain()`` and compares the numbers.

    Raises :class:`DrainTimeout` after ``timeout`` (default 10 s, ``None``: never), caused by the failures until then.

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
