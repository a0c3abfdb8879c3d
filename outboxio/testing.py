"""For the tests of applications: an outbox in memory, a clock that moves when told, and looks at what was emitted.

The in-memory outbox is the real thing on SQLite: same statements, same semantics, no server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from outboxio.clock import naive_utc, utc_now
from outboxio.duration import parse_duration
from outboxio.errors import InvalidEvent
from outboxio.event import Event, type_names
from outboxio.outbox import Drained, Outbox
from outboxio.settings import Settings

E = TypeVar("E", bound=Event)


class MovableClock:
    """A clock that stands still until it is moved. Give it to an outbox: ``Outbox(..., clock=clock)``.

    Moments are naive UTC; an aware one is converted. It starts now unless told otherwise.

    Example::

        clock = MovableClock(datetime(2026, 1, 1))
        clock.advance(timedelta(minutes=5))      # or 300, or "5m"
        assert clock.now() == datetime(2026, 1, 1, 0, 5)
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._now = utc_now() if start is None else naive_utc(start)

    def now(self) -> datetime:
        """The moment at which the clock stands."""
        return self._now

    def __call__(self) -> datetime:
        return self._now

    def advance(self, delta: timedelta | float | str) -> datetime:
        """Move the clock on; the new moment."""
        self._now += parse_duration(delta, key="advance")
        return self._now

    def set(self, moment: datetime) -> None:
        """Move the clock to a moment, forward or back."""
        self._now = naive_utc(moment)


@asynccontextmanager
async def memory_outbox(
    *,
    namespace: str = "test",
    settings: Settings | None = None,
    clock: MovableClock | None = None,
    resources: Any = None,
) -> AsyncGenerator[Outbox]:
    """An outbox in memory with its tables made, closed at the end. Handlers run when you call ``drain()``.

    Example::

        async with memory_outbox(clock=clock) as outbox:
            outbox.add_handler(SendReceipt(mailer))
            await outbox.executor.execute(DepositMoney(wallet_id, Decimal(10)))
            await outbox.drain()
            assert mailer.sent == [wallet_id]
    """
    async with Outbox("sqlite://", namespace=namespace, settings=settings, clock=clock, resources=resources) as outbox:
        await outbox.migrate()
        yield outbox


async def emitted(outbox: Outbox, event_type: type[E]) -> Sequence[E]:
    """The events of a class that were committed in this outbox's namespace, oldest first.

    Example::

        assert await emitted(outbox, MoneyDeposited) == [MoneyDeposited(wallet_id, Decimal(10))]
    """
    payloads = await outbox.admin.payloads(sorted(type_names(event_type)))
    return [msgspec.json.decode(payload, type=event_type) for payload in payloads]


async def expect_event(outbox: Outbox, event_type: type[E], **fields: Any) -> E:
    """The one committed event of a class whose fields have these values; ``AssertionError`` shows what there is.

    Example::

        event = await expect_event(outbox, MoneyDeposited, wallet_id=wallet_id)
        assert event.amount == Decimal(10)
    """
    unknown = fields.keys() - set(event_type.__struct_fields__)
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


async def drain(outbox: Outbox, timeout: timedelta | float | str | None = "10s") -> Drained:
    """``outbox.drain()``, which gives up after a while instead of hanging a test."""
    return await outbox.drain(timeout)
