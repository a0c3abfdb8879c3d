"""A process whose handler ends it for certain events, for tests with a supervisor that restarts it.

``python -m tests.flow.poison_worker '{...}'``: runs until SIGTERM, and reports like ``worker.py``: ``running``,
``begun`` and ``done`` with handler and number, ``buried`` (a hook), ``queried`` (the table of recorded starts),
``left``. ``poison``: the numbers of the events for which a handler ends the process, ``how``: by ``os._exit`` or a
fault. With ``crash_in_hook``, the hook does so. ``holds_after``: the number of runs after which each further run waits
until this process leaves.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from outboxio import Batch, EventEnvelope, Outbox, Settings, Unprocessable
from tests.flow.worker import Reporting, report, stop_on_sigterm
from tests.kit import opened_by
from tests.kit.app import MoneyDeposited
from tests.kit.inside import database_of
from tests.kit.sql import sql

EFFECT = "INSERT INTO effects (number) VALUES ($1)"


def die(how: str) -> None:
    if how == "fault":
        ctypes.string_at(0)
    os._exit(9)


def add_handler(
    outbox: Outbox,
    *,
    name: str,
    poison: tuple[int, ...] = (),
    how: str = "exit",
    sleep: float = 0,
    batch: int | None = None,
    hook: bool = False,
    crash_in_hook: bool = False,
    holds_after: int | None = None,
    **options: Any,
) -> None:
    runs = itertools.count(1)

    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        number = int(envelope.event.amount)
        report("begun", handler=name, number=number, attempt=envelope.attempt)
        await asyncio.sleep(sleep)
        if holds_after is not None and next(runs) > holds_after:
            await envelope.stopping.wait()
        if options.get("delivery") == "transactional":
            await envelope.tx.execute(sql(envelope.tx, EFFECT), number)
        if number in poison:
            if crash_in_hook:
                raise Unprocessable("to be buried")
            die(how)
        report("done", handler=name, number=number)

    async def handle_all(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        numbers = [int(envelope.event.amount) for envelope in envelopes]
        report("begun", handler=name, numbers=numbers)
        await asyncio.sleep(sleep)
        if set(poison).intersection(numbers):
            die(how)
        report("done", handler=name, numbers=numbers)

    async def bury(envelope: EventEnvelope[MoneyDeposited], error: Exception) -> None:
        number = int(envelope.event.amount)
        report("buried", handler=name, number=number, error=str(error))
        if crash_in_hook:
            die(how)

    if hook:
        options["on_dead"] = bury
    if batch:
        options["batch"] = Batch(size=batch, max_wait="50ms")
    outbox.handler(MoneyDeposited, name=name, **options)(handle_all if batch else handle)


def report_starts(outbox: Outbox) -> None:
    """Report every query of the table of recorded starts."""
    starts = database_of(outbox).starts

    def reporting(name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(starts, name)

        async def recorded(*args: Any) -> Any:
            report("queried", method=name)
            return await method(*args)

        return recorded

    for name in ("record", "find", "remove", "remove_ended"):
        setattr(starts, name, reporting(name))


async def main(config: dict[str, Any]) -> None:
    stop = stop_on_sigterm()
    settings = Settings.load(config["settings"], environ=None)
    async with Outbox(config["database"], namespace="app", settings=settings) as outbox:
        report_starts(outbox)
        for handler in config["handlers"]:
            add_handler(outbox, **handler)
        async with outbox.running():
            report("running")
            await stop.wait()
    report("left")


if __name__ == "__main__":
    logging.getLogger("outboxio").addHandler(Reporting(logging.WARNING))
    opened_by.use()
    asyncio.run(main(json.loads(sys.argv[1])))
