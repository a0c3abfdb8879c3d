"""The pages of event types: the types of the code, of the rows, and of handlers in other processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pytest

import outboxio
from outboxio import Event, EventEnvelope, Outbox
from outboxio.dashboard import Access, Dashboard
from outboxio.integrations.nats import NatsRelay
from tests.kit.dashboards import browser

pytestmark = [pytest.mark.usefixtures("patient_pages"), pytest.mark.above_statements, pytest.mark.with_tables]

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Line(msgspec.Struct):
    sku: Annotated[str, msgspec.Meta(description="The <b>article</b>", max_length=40)]
    price: Decimal | None = None


class Placed(Event, aliases={"Created"}, version=2):
    """A customer has placed an order."""

    order: int
    lines: list[Line]


@outboxio.upcaster(Placed, from_version=1)
def with_lines(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "lines": []}


class Elsewhere(Event):
    number: int


async def test_an_event_type_has_fields_handlers_relays_and_actions(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()

    @outbox.handler(Placed, name="receipt")
    async def receipt(envelope: EventEnvelope[Placed]) -> None: ...

    outbox.add_handler(NatsRelay("nats://127.0.0.1:1", name="to-nats", types=(Placed,), subject="shop.{event_type}"))
    async with outbox.transaction("PlaceOrder") as tx:
        tx.emit(Placed(1, []))

    async with browser(Dashboard(outbox, authorize=lambda request: Access.viewer("grace"))) as client:
        facts = (await client.get("/event-types/Placed?format=json")).json()
        page = (await client.get("/event-types/Created")).text
        missing = await client.get("/event-types/Nothing")

    assert [(field["path"], field["type"], field["required"]) for field in facts["fields"]] == [
        ("order", "integer", True), ("lines", "list of Line", True), ("lines[].sku", "string", True),
        ("lines[].price", "string (decimal) or null", False),
    ]  # fmt: skip
    assert facts["fields"][2]["notes"] == ["The <b>article</b>", "length at most 40"]
    assert (facts["type"]["emitted_by"], facts["type"]["handlers"]) == (["PlaceOrder"], ["receipt"])
    assert facts["type"]["relays"] == [{"handler": "to-nats", "address": "shop.Placed"}]
    for text in ("version 2", "A customer has placed an order.", "rows of Created", "from version 1", "&lt;b&gt;"):
        assert text in page
    assert missing.status_code == 404


async def test_types_without_code_are_listed_by_rows_and_handlers(make_outbox: MakeOutbox) -> None:
    elsewhere, here = await make_outbox(), await make_outbox()

    @elsewhere.handler(Elsewhere, name="counts")
    async def counts(envelope: EventEnvelope[Elsewhere]) -> None: ...

    async with elsewhere.transaction("Count") as tx:
        tx.emit(Elsewhere(1))
        tx.emit(Placed(1, []))
    await elsewhere.drain()

    async with browser(Dashboard(here, authorize=lambda request: Access.viewer("grace"))) as client:
        types = (await client.get("/event-types?format=json")).json()["types"]
        page = (await client.get("/event-types/Elsewhere")).text

    assert [(one["name"], one["handlers"], one["emitted_by"], one["schema"]) for one in types] == [
        ("Elsewhere", ["counts"], ["Count"], None), ("Placed", [], ["Count"], None),
    ]  # fmt: skip
    assert "does not have the class of the event type" in page
