"""The host name is never part of a statement."""

from __future__ import annotations

from urllib.parse import urlsplit

import asyncpg
import pytest

from outboxio import Outbox
from outboxio.model.lock_name import channel_name
from outboxio.support import machine
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import owner_of

HOSTILE = ["a\\'; DROP TABLE public.precious; --", "a'; DROP TABLE public.precious; --", "a\\", "a\"'$$%s{}"]


@pytest.mark.parametrize("host", HOSTILE)
@pytest.mark.parametrize("backslashes", ["on", "off"])
async def test_a_wakeup_arrives_from_a_host_with_any_name(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, host: str, backslashes: str
) -> None:
    """Over the pool of a process that only executes, and over the lock session of a process that handles."""
    look, received = Look(postgres_url), set[str]()
    await look.fetch("CREATE TABLE public.precious (x int)")
    name = urlsplit(postgres_url).path[1:]
    await look.fetch(f'ALTER DATABASE "{name}" SET standard_conforming_strings = {backslashes}')
    monkeypatch.setattr(machine, "host", lambda: host)
    journal, listener = Journal(), await asyncpg.connect(postgres_url)
    try:
        await listener.add_listener(channel_name("app"), lambda *arguments: received.add(arguments[3]))
        async with Outbox(postgres_url, namespace="app") as producer, Outbox(postgres_url, namespace="app") as worker:
            await producer.migrate()
            worker.handler(MoneyDeposited, name="first")(journal)
            async with worker.running():
                await producer.executor.execute(Emit((1,)))
                await journal.calls(1)
                await worker.admin.pause(
                    "first"
                )  # if the row was handed over and needed no wake-up, this wakes them too
                await eventually(
                    lambda: {f"events {owner_of(producer)}", f"notifications {owner_of(worker)}"} <= received
                )
    finally:
        await listener.close()

    assert owner_of(producer).startswith(host)
    assert await look.value("SELECT to_regclass('public.precious') IS NOT NULL")
