"""``outbox.close()`` closes handler objects after all runs have finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import EventEnvelope, EventHandler, Handlers, Outbox, Settings
from tests.kit.app import Emit, MoneyDeposited, eventually

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Mails(EventHandler[MoneyDeposited]):
    name = "mails"

    def __init__(self, log: list[str], name: str = "mails") -> None:
        self.log = log
        self.name = name  # type: ignore[misc]
        self.started = False

    async def handle(self, envelope: EventEnvelope[MoneyDeposited]) -> None:
        self.started = True
        await asyncio.sleep(0.05)
        self.log.append("handled")

    async def close(self) -> None:
        self.log.append("closed")


async def test_a_handler_is_closed_once_after_its_runs_end(make_outbox: MakeOutbox) -> None:
    outbox, log = await make_outbox(), list[str]()
    router, mails = Handlers(), Mails(log)
    router.add_handler(mails)
    outbox.include(router)

    async with outbox.running():
        await outbox.execute(Emit((1,)))
        await eventually(lambda: mails.started)
        assert log == []
        await outbox.close()
    assert log == ["handled", "closed"]

    await outbox.execute(Emit((2,)))
    await outbox.drain()
    await outbox.close()
    assert log == ["handled", "closed"] * 2


async def test_leaving_running_closes_no_handler(make_outbox: MakeOutbox) -> None:
    outbox, log = await make_outbox(), list[str]()
    outbox.add_handler(Mails(log))
    async with outbox.running():
        pass
    assert log == []


class Breaks(Mails):
    """Its first close fails."""

    async def close(self) -> None:
        if not self.started:
            self.started = True
            raise ValueError(self.name)


class Hangs(Mails):
    """Its first close hangs."""

    async def close(self) -> None:
        if not self.started:
            self.started = True
            await asyncio.Event().wait()


async def test_a_failing_or_hanging_close_keeps_nothing_else_open(make_outbox: MakeOutbox) -> None:
    outbox, log = await make_outbox(settings=Settings(shutdown_timeout="100ms")), list[str]()
    for handler in (Breaks(log, "breaks"), Hangs(log, "hangs"), Mails(log)):
        outbox.add_handler(handler)
    await outbox.drain()

    with pytest.raises(ExceptionGroup) as closing:
        await outbox.close()

    assert log == ["closed"]
    assert sorted(type(error).__name__ for error in closing.value.exceptions) == ["TimeoutError", "ValueError"]
    [noted] = [error.__notes__ for error in closing.value.exceptions if isinstance(error, ValueError)]
    assert "close() of handler 'breaks'" in noted[0]


class Plain(Mails):
    def close(self) -> Any:
        self.log.append("closed")


async def test_a_synchronous_close_is_called_as_well(make_outbox: MakeOutbox) -> None:
    outbox, log = await make_outbox(), list[str]()
    outbox.add_handler(Plain(log))
    await outbox.close()
    assert log == ["closed"]
