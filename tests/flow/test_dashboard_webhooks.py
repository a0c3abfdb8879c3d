"""The page with the endpoints of outgoing webhooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from outboxio import Event, Outbox
from outboxio.dashboard import Access, Dashboard, allow_all
from outboxio.dashboard.page_request import WEBHOOK_DELIVERY
from outboxio.integrations.webhooks import Endpoint, Webhooks
from outboxio.integrations.webhooks.outgoing import WebhookDelivery
from outboxio.model.event import type_name
from tests.kit.dashboards import browser
from tests.kit.endpoints import SECRET, answer, receiving

pytestmark = pytest.mark.usefixtures("patient_pages")


class Shipped(Event):
    order: int


def test_the_name_of_deliveries_is_known_without_the_extra() -> None:
    assert type_name(WebhookDelivery) == WEBHOOK_DELIVERY


async def test_endpoints_are_listed_with_failures_first(tmp_path: Path) -> None:
    async with (
        receiving() as good,
        receiving() as bad,
        Outbox(f"sqlite:///{tmp_path}/app.db", namespace="app") as outbox,
    ):
        bad.answer = answer(500, "<b>card 4111</b>")
        found = [Endpoint(good.url, [SECRET], "a-good"), Endpoint(bad.url, [SECRET], "b-bad")]
        outbox.add_handler(Webhooks(name="hooks", types=[Shipped], endpoints=found, allow=["127.0.0.0/8"]))
        await outbox.migrate()
        async with outbox.transaction("ship") as tx:
            tx.emit(Shipped(1))
        await outbox.drain()

        async with browser(Dashboard(outbox, authorize=allow_all)) as client:
            page = (await client.get("/webhooks")).text
            assert page.index("b-bad") < page.index("a-good")
            assert "the endpoint answered 500: &lt;b&gt;card" in page
            assert 'href="/notifications?handler=hooks.deliveries&amp;model=b-bad"' in page
            listed = (await client.get("/notifications?handler=hooks.deliveries&model=b-bad")).text
            assert "b-bad" in listed
            assert "a-good" not in listed
        async with browser(Dashboard(outbox, authorize=lambda request: Access.viewer("grace"))) as client:
            assert "4111" not in (await client.get("/webhooks")).text


async def test_an_outbox_without_webhooks_has_no_link(tmp_path: Path) -> None:
    async with Outbox(f"sqlite:///{tmp_path}/app.db", namespace="app") as outbox:
        await outbox.migrate()
        async with browser(Dashboard(outbox, authorize=allow_all)) as client:
            assert "Webhooks" not in (await client.get("/")).text
            assert "No webhooks delivered yet" in (await client.get("/webhooks")).text
