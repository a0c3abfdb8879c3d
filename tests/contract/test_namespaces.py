"""Known namespaces: a misspelt one is refused instead of appearing empty."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from outboxio import Outbox
from outboxio.dashboard import Dashboard, allow_all
from tests.kit.app import Emit, Journal, MoneyDeposited
from tests.kit.dashboards import browser

MakeOutbox = Callable[..., Awaitable[Outbox]]


@pytest.mark.above_statements(False)
async def test_a_namespace_is_known_once_a_process_wrote_to_it(make_outbox: MakeOutbox) -> None:
    looking = await make_outbox(namespace="nobody")
    assert await looking.admin.namespaces() == []

    for name in ("writes", "delivers"):
        outbox = await make_outbox(namespace=name)
        await outbox.executor.execute(Emit((1, 2)))
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.drain()

    assert await looking.admin.namespaces() == ["delivers", "writes"]


async def test_a_processs_own_namespace_is_known_after_it_ran(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(namespace="quiet")
    async with outbox.running():
        await outbox.drain()

    assert await outbox.admin.namespaces() == ["quiet"]


async def test_a_process_with_handlers_may_create_its_namespace(make_outbox: MakeOutbox) -> None:
    await (await make_outbox(namespace="bookings")).executor.execute(Emit((1,)))
    outbox, misspelt = await make_outbox(namespace="mail"), await make_outbox(namespace="bookngs")
    outbox.handler(MoneyDeposited, name="first")(Journal())

    assert await outbox.admin.unknown_namespace() is None
    assert await misspelt.admin.unknown_namespace() == "no such namespace 'bookngs'; there are: 'bookings'"


@pytest.mark.above_statements
async def test_the_dashboard_refuses_a_misspelt_namespace(make_outbox: MakeOutbox) -> None:
    shop, misspelt = await make_outbox(namespace="bookings"), await make_outbox(namespace="bookngs")
    async with browser(Dashboard(misspelt, authorize=allow_all)) as client:
        assert (await client.get("/")).status_code == 200
    await shop.executor.execute(Emit((1,)))
    async with browser(Dashboard(misspelt, authorize=allow_all)) as client:
        page = await client.get("/")

    assert page.status_code == 404
    assert "No such namespace &#39;bookngs&#39;; there are: &#39;bookings&#39;." in page.text
