"""Requests that no page of the dashboard sends: too many fields, invalid hosts, external paths, forged cursors."""

from __future__ import annotations

import base64
import gc
import re
import warnings
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from outboxio import Filter, Outbox
from outboxio.dashboard import Access, Dashboard, allow_all
from outboxio.dashboard.app import FORM_ACTIONS, PAGES
from outboxio.testing import memory_outbox
from tests.kit.dashboards import browser, send_form

pytestmark = pytest.mark.usefixtures("patient_pages")

ID = "019c0000-0000-7000-8000-000000000000"
MANY = "&".join(["a=1"] * 2001)
PATHS = [re.sub(r"\{\w+(:\w+)?\}", ID, route.path) for route in PAGES]


@pytest.fixture
async def outbox() -> AsyncIterator[Outbox]:
    async with memory_outbox(namespace="shop") as outbox:
        yield outbox


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
async def test_too_many_fields_are_answered_with_a_page(outbox: Outbox, path: str) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        answers = [await client.get(f"{path}?{query}") for query in (MANY, "&" * 2000)]

    assert {answer.status_code for answer in answers} == {404 if path == "/nothing" else 414}
    assert all("content-security-policy" in answer.headers for answer in answers)
    assert all("<main" in answer.text for answer in answers)


async def test_an_operation_with_too_many_url_parameters_is_refused(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        address = await send_form(client, f"/operations/pause?{MANY}", {"handler": "x"})
        back = await send_form(client, "/operations/retry", {"id": ID, "back": f"/?{MANY}"})

    assert address.status_code == 414
    assert back.status_code == 303


@pytest.mark.parametrize("host", ["[", "[::1", "a]b", "[v1.x"])
async def test_an_invalid_host_is_answered_before_authorize(outbox: Outbox, host: str) -> None:
    def authorize(request: Request) -> Access:
        return Access.admin(str(request.url))

    async with browser(Dashboard(outbox, authorize=authorize)) as client:
        for path in (*PATHS, "/nothing"):
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == 400, path
        answer = await client.post("/operations/pause", headers={"host": host})
        assert answer.status_code == 400


async def test_an_invalid_origin_is_refused(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        for origin in ("http://[", "http://a]b", "["):
            answer = await client.post("/operations/pause", headers={"origin": origin}, data={"handler": "x"})
            assert answer.status_code == 403, origin


async def raw(app: Any, path: str, root: str = "") -> str:
    """The answer to a path that no client library sends unchanged."""
    body = b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    scope = {
        "type": "http", "method": "GET", "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": root,
        "query_string": b"after=x", "headers": [(b"host", b"shop")], "http_version": "1.1", "server": ("shop", 80),
        "client": ("shop", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return body.decode()


@pytest.mark.parametrize(
    "path", ["//evil.example", "//evil.example/x", "///evil.example/x", "//evil.example//dead", "//"]
)
async def test_no_link_leads_to_another_host(outbox: Outbox, path: str) -> None:
    dashboard = Dashboard(outbox, authorize=allow_all)
    mounted = Starlette(routes=[Mount("/outbox", dashboard), Mount("/", dashboard)])
    for page in (await raw(dashboard, path), await raw(mounted, path), await raw(mounted, f"/outbox{path}")):
        assert re.findall(r'(?:href|action|value)="(?://|/\\)[^"]*"', page) == []


@pytest.mark.parametrize("action", FORM_ACTIONS, ids=lambda action: action.path)
async def test_an_operation_without_a_database_leaves_no_coroutine(action: Any) -> None:
    outbox = Outbox("postgresql://u:p@127.0.0.1:1/x", namespace="shop")
    fields = {"handler": "x", "job": "x", "key": "x", "id": ID, "sure": "yes", "typed": "x", "since": "2026-01-01"}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        async with browser(Dashboard(outbox, authorize=allow_all)) as client:
            for sent in (fields, {**fields, "typed": "shop"}, {"handler": "x", "sure": "yes"}):
                answer = await send_form(client, action.path, sent, page="/glossary")
                assert answer.status_code in (400, 422, 503)
        gc.collect()
    await outbox.close()

    assert [str(one.message) for one in found if "never awaited" in str(one.message)] == []


def forged(cursor: object, filter: Filter | None = None) -> str:
    """A cursor for a list with this filter, with a forged position."""
    digest = sha256(msgspec.json.encode(filter or Filter())).hexdigest()[:8]
    return base64.urlsafe_b64encode(msgspec.json.encode([digest, {"default": cursor}])).decode().rstrip("=")


DEAD = Filter(states=("DEAD", "EXPIRED"))
FORGED: dict[str, list[Any]] = {
    "/notifications": [
        ["all", "", ["x", "", "0"]], ["all", "", []], ["all", "", [ID]], ["all", "", [ID, "", "x"]],
        ["all", "", [ID, "\0", "0"]], ["nowhere", "", [ID, "", "0"]], ["end", "x", []], ["all", "", [ID, "", "0", "0"]],
        ["all", "", "text"], [], 7, "text", ["all", "", [ID, 3, "0"]], ["all", "", [ID, "", "99999999999999999999"]],
    ],
    "/dead": [
        ["dead", "a", ["x", ID, "0"]], ["dead", "a", ["2026-02-30 00:00:00.000000", ID, "0"]],
        ["dead", "a", ["2026-01-01 00:00:00.000000", "x", "0"]], ["dead", "a", ["2026-01-01", ID, "0"]],
        ["dead", "\0", ["2026-01-01 00:00:00.000000", ID, "0"]],
    ],
    "/notifications?state=PENDING": [
        ["waiting", "a", ["2026-01-01 00:00:00.000000", "x", "0"]], ["waiting", "a", ["x", "1", "0"]],
        ["waiting", "a", ["2026-01-01 00:00:00.000000", "9" * 40, "0"]],
    ],
    "/notifications?state=BLOCKED": [["blocked", "a", ["k", "x", "0"]], ["blocked", "a", ["k", "1", "x"]]],
    "/events": ["x", 7, [], ["all"]],
    "/actions": ["x", 7, [ID, ["x"]], [ID, ID]],
    "/operations": [["x", ID], ["2026-01-01T00:00:00", "x"], ["2026-01-01T00:00:00+02:00", ID], [], 7],
}  # fmt: skip
FILTERS = {
    "/dead": DEAD, "/notifications?state=PENDING": Filter(states=("PENDING",)),
    "/notifications?state=BLOCKED": Filter(states=("BLOCKED",)),
}  # fmt: skip


async def answers_to(client: httpx.AsyncClient, page: str, cursor: str) -> list[int]:
    address = f"{page}{'&' if '?' in page else '?'}after={cursor}"
    return [(await client.get(address + form)).status_code for form in ("", "&format=json")]


@pytest.mark.parametrize("page", FORGED)
async def test_a_forged_cursor_is_a_bad_request(outbox: Outbox, page: str) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        for cursor in FORGED[page]:
            assert await answers_to(client, page, forged(cursor, FILTERS.get(page))) == [400, 400], cursor
        for cursor in ("x", "%00", "W10", "bnVsbA", "eyJhIjoxfQ", "A" * 5000, ID[:-1]):
            assert await answers_to(client, page, cursor) == [400, 400], cursor
