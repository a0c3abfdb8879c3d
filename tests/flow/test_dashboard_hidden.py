"""A dashboard user without the permission ``payloads`` cannot find out anything about error messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest
from msgspec.structs import replace

from outboxio import Event, EventEnvelope, Filter, Outbox, RetryPolicy
from outboxio.dashboard import Access, Dashboard
from outboxio.dashboard.pages.overview import without_messages
from outboxio.health.values import Finding
from outboxio.model.notification import State
from tests.kit.dashboards import browser, send_form

pytestmark = pytest.mark.usefixtures("patient_pages")

SECRET = "4929-1234"
ON_CALL = Access("eve", can={"retry", "skip"})
LISTS = ("/dead", "/notifications")
FORM_ACTIONS = ("/operations/retry", "/operations/skip")


class Paid(Event):
    card: str


@asynccontextmanager
async def desk(access: Access) -> AsyncGenerator[tuple[Outbox, httpx.AsyncClient]]:
    """An outbox with two dead letters with different errors of the same class, and a browser."""
    outbox = Outbox("sqlite://", namespace="shop")

    @outbox.handler(Paid, name="charge", retry=RetryPolicy(max_attempts=1))
    async def charge(envelope: EventEnvelope[Paid]) -> None:
        raise ValueError(f"card {envelope.event.card} refused")

    async with outbox:
        await outbox.migrate()
        async with outbox.transaction("pay") as tx:
            tx.emit(Paid(SECRET))
        async with outbox.transaction("pay") as tx:
            tx.emit(Paid("none"))
        await outbox.drain(timeout=20)
        async with browser(Dashboard(outbox, authorize=lambda request: access)) as client:
            yield outbox, client


@pytest.mark.parametrize("access", [Access.viewer("grace"), ON_CALL], ids=["viewer", "on call"])
@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("form", ["", "&format=json", "&after=WyI", "&state=DEAD"])
async def test_filtering_by_error_needs_the_payloads_permission(path: str, access: Access, form: str) -> None:
    async with desk(access) as (_, client):
        answers = {guess: await client.get(f"{path}?error={guess}{form}") for guess in (SECRET, "wrong", "ValueError")}

    assert {answer.status_code for answer in answers.values()} == {403}
    assert len({answer.text.replace(guess, "") for guess, answer in answers.items()}) == 1
    assert "cannot filter by error" in answers[SECRET].text


@pytest.mark.parametrize("path", FORM_ACTIONS)
async def test_operating_by_error_needs_the_payloads_permission(path: str) -> None:
    async with desk(ON_CALL) as (outbox, client):
        for fields in ({"error": SECRET}, {"error": "wrong"}, {"error": SECRET, "sure": "yes", "typed": "1"}):
            answer = await send_form(client, path, fields)
            assert answer.status_code == 403
            assert "cannot filter by error" in answer.text
        assert await outbox.admin.operations() == []
        assert int(await outbox.admin.count(Filter(states=(State.DEAD,)))) == 2


async def test_a_user_with_the_payloads_permission_filters_by_error() -> None:
    async with desk(Access.operator("ada")) as (_, client):
        assert len((await client.get(f"/dead?error={SECRET}&format=json")).json()["rows"]) == 1
        assert 'name="error"' in (await client.get("/dead")).text
        assert (await send_form(client, "/operations/retry", {"error": SECRET})).status_code == 200


async def test_pages_without_the_payloads_permission_link_to_no_refused_filter() -> None:
    async with desk(ON_CALL) as (_, client):
        for path in ("/", "/dead", "/notifications", "/handlers/charge"):
            page = (await client.get(path)).text
            assert "error=" not in page, path
            assert 'name="error"' not in page, path
        [group] = (await client.get("/dead?format=json")).json()["grouped"]["groups"]
        assert (group["error"], group["count"], group["filter"]["handler"]) == ("ValueError", 2, ["charge"])
        assert len((await client.get("/handlers/charge?format=json")).json()["groups"]) == 1
        assert (await send_form(client, "/operations/retry", {"handler": "charge"})).status_code == 200


async def test_operations_of_others_hide_their_error_filter() -> None:
    async with desk(Access.viewer("grace")) as (outbox, client):
        operation = await outbox.admin.retry(Filter(error=SECRET), actor="ada")
        await outbox.admin.retry(Filter(error=SECRET, handler="charge"), actor="ada")
        for path in ("/operations", f"/operations/{operation.id}", "/handlers/charge", f"/?did={operation.id}"):
            for form in (path, f"{path}{'&' if '?' in path else '?'}format=json"):
                answer = await client.get(form)
                assert answer.status_code == 200
                assert SECRET not in answer.text, form


async def test_finding_texts_omit_error_messages() -> None:
    sentences = {
        "circuit_open": "The circuit breaker of `a: b` has been open for 2 min in process h: card 4929-1234: away.",
        "failing_long": "2 notifications of `a: b` have been failing for 5 h: ValueError: card 4929-1234. Others wait.",
        "operation_failed": "Operation failed: retry by ada: card 4929-1234",
    }
    async with desk(Access.viewer("grace")) as (outbox, _):
        overview = await outbox.admin.overview()
    for rule, sentence in sentences.items():
        finding = Finding(rule=rule, level="degraded", text=sentence, fix="", handler="a: b", shard="x")
        [shown] = without_messages(replace(overview, findings=(finding,))).findings
        assert sentence.startswith(shown.text.rstrip("."))
        assert SECRET not in shown.text
