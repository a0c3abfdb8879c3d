"""The frame of the dashboard: strangers, rights, forms of other sites, headers, mounts and proxies, errors."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from litestar import Litestar, asgi
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Mount

from outboxio import ConfigurationError, DatabaseUnavailable, Outbox
from outboxio.dashboard import RIGHTS, Access, Dashboard, allow_all, basic_auth
from outboxio.dashboard.app import ORDERS, PAGES
from outboxio.dashboard.asked import Asked, checked_back
from outboxio.dashboard.guard import HEADERS
from outboxio.dashboard.view import view_of
from outboxio.health.rules import RULE_NAMES, RULES
from outboxio.testing import memory_outbox
from tests.kit.dashboards import BASE, browser, send_form

pytestmark = pytest.mark.usefixtures("in_process")

ID = "019c0000-0000-7000-8000-000000000000"
STATIC = Path(__file__).parents[2] / "outboxio" / "dashboard" / "static"


@pytest.fixture
async def outbox() -> AsyncIterator[Outbox]:
    async with memory_outbox(namespace="shop") as outbox:
        yield outbox


def with_access(access: Access | None) -> Callable[[Request], Access | None]:
    return lambda request: access


def address_of(path: str) -> str:
    """A path of the tables, with a value for each parameter."""
    return re.sub(r"\{\w+(:\w+)?\}", ID, path)


def bad_words(response: httpx.Response) -> str:
    return f"{response.request.method} {response.request.url.path} -> {response.status_code}"


# --- who may see and order ------------------------------------------------------------------------


def test_a_dashboard_is_not_mounted_open_by_omission(outbox: Outbox) -> None:
    with pytest.raises(TypeError, match="authorize"):
        Dashboard(outbox)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=r"authorize is None; expected a function"):
        Dashboard(outbox, authorize=None)  # type: ignore[arg-type]


async def test_a_stranger_gets_404_for_every_path_and_hears_nothing_else(outbox: Outbox) -> None:
    paths = [address_of(route.path) for route in PAGES] + ["/nothing", "/static/x/outboxio.css"]
    async with browser(Dashboard(outbox, authorize=with_access(None))) as client:
        answers = [await client.get(path) for path in paths]
        answers += [await client.post(order.path) for order in ORDERS]

    assert {(answer.status_code, answer.text) for answer in answers} == {(404, "Not Found")}
    assert not client.cookies


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.path)
async def test_every_order_is_refused_without_its_right(order: Any, outbox: Outbox) -> None:
    others = Access("ada", set(RIGHTS) - {order.right})
    read_only = Dashboard(outbox, authorize=allow_all, read_only=True)
    for app in (Dashboard(outbox, authorize=with_access(others)), read_only):
        async with browser(app) as client:
            answer = await send_form(client, address_of(order.path))

        assert answer.status_code == 403, bad_words(answer)
        assert "does not have the right" in answer.text
    assert not await outbox.admin.operations()


@pytest.mark.parametrize("route", [route for route in PAGES if route.right != "view"], ids=lambda route: route.path)
async def test_every_page_with_a_right_is_refused_without_the_right(route: Any, outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=with_access(Access("ada", set(RIGHTS) - {route.right})))) as client:
        answer = await client.get(address_of(route.path))

    assert answer.status_code == 403, bad_words(answer)


@pytest.mark.parametrize("route", PAGES, ids=lambda route: route.path)
async def test_every_page_answers_and_has_no_forms_that_order_for_a_viewer(route: Any, outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=with_access(Access.viewer("ada")))) as client:
        answer = await client.get(address_of(route.path))

    assert answer.status_code in (200, 400, 403, 404), bad_words(answer)
    assert 'method="post"' not in answer.text
    assert " style=" not in answer.text
    assert "<script>" not in answer.text


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.path)
async def test_every_order_is_a_post(order: Any) -> None:
    assert order.right in RIGHTS
    assert order.right not in ("view", "payloads"), "an order changes rows"


async def test_a_database_that_takes_no_orders_makes_the_dashboard_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, an_order: list[dict[str, str]]
) -> None:
    file = tmp_path / "shop.db"
    async with Outbox(f"sqlite:///{file}", namespace="shop") as outbox:
        await outbox.migrate()
        may_write = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != str(file) and may_write(path, mode))
        async with browser(Dashboard(outbox, authorize=allow_all)) as client:
            page = await client.get("/")
            answer = await send_form(client, "/orders/remember")

    assert "read only" in page.text
    assert answer.status_code == 403
    assert f"this process may not write the file {file}" in answer.text
    assert an_order == []


async def test_authorize_may_be_async_and_may_answer_itself(outbox: Outbox) -> None:
    async def operators(request: Request) -> Access | RedirectResponse:
        if request.headers.get("x-user") is None:
            return RedirectResponse("/login", 302)
        return Access.operator(request.headers["x-user"])

    async with browser(Dashboard(outbox, authorize=operators)) as client:
        stranger, operator = await client.get("/"), await client.get("/", headers={"x-user": "ada@example.org"})

    assert (stranger.status_code, stranger.headers["location"]) == (302, "/login")
    assert "ada@example.org" in operator.text


async def test_an_exception_of_authorize_is_answered_by_the_application_around(outbox: Outbox) -> None:
    def operators(request: Request) -> Access:
        raise HTTPException(401, "log in first")

    async with browser(in_fastapi(Dashboard(outbox, authorize=operators))) as client:
        answer = await client.get("/ops/outbox/")

    assert (answer.status_code, answer.json()) == (401, {"detail": "log in first"})


async def test_an_answer_of_authorize_without_a_meaning_is_an_error_and_lets_nobody_in(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=lambda request: True)) as client:  # type: ignore[arg-type,return-value]
        with pytest.raises(ConfigurationError, match="authorize returned True; expected an Access"):
            await client.get("/")


async def test_basic_auth_wants_the_password_of_the_environment(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="OUTBOX_PASSWORD is not set"):
        basic_auth("ops", password_env="OUTBOX_PASSWORD")
    monkeypatch.setenv("OUTBOX_PASSWORD", "sesam: öffne dich")
    app = Dashboard(outbox, authorize=basic_auth("ops", password_env="OUTBOX_PASSWORD", access=Access.viewer))
    async with browser(app) as client:
        asked = await client.get("/")
        wrong = await client.get("/", headers={"authorization": "Basic b3BzOm9wcw=="})
        broken = await client.get("/", headers={"authorization": "Basic ?"})
        right = await client.get("/", auth=httpx.BasicAuth("ops", "sesam: öffne dich"))

    assert [one.status_code for one in (asked, wrong, broken, right)] == [401, 401, 401, 200]
    assert asked.headers["www-authenticate"].startswith("Basic realm=")


def test_rights_are_named_and_bounded() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no right 'rtery'; the rights are view, payloads, retry"):
        Access("ada", {"rtery"})
    with pytest.raises(ConfigurationError, match="actor"):
        Access("")
    assert Access("ada", {"retry"}).may("view")
    assert not Access.viewer("ada").orders
    assert {right for right in RIGHTS if not Access.operator("ada").may(right)} == {"purge", "unsubscribe"}
    assert Access.admin("ada").reading().can == {"view", "payloads"}


# --- headers and forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/nothing", "/glossary", "/?format=json"])
async def test_every_answer_has_the_headers(path: str, outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        answer = await client.get(path)

    assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
    assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]


async def test_a_file_has_an_address_for_ever_and_a_tag(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        page = await client.get("/")
        [address] = re.findall(r'href="([^"]+outboxio\.css)"', page.text)
        first = await client.get(address)
        again = await client.get(address, headers={"if-none-match": first.headers["etag"]})
        missing = await client.get("/static/x/passwd")

    assert first.headers["content-type"].startswith("text/css")
    assert "immutable" in first.headers["cache-control"]
    assert (again.status_code, again.content) == (304, b"")
    assert missing.status_code == 404


@pytest.fixture
def an_order(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """An order that only remembers its forms, at ``/orders/remember``."""
    from outboxio.dashboard import app
    from outboxio.dashboard.view import Done, Order

    forms: list[dict[str, str]] = []

    async def remember(asked: Asked, form: Any) -> Done:
        forms.append(dict(form))
        return Done()

    monkeypatch.setattr(app, "ORDERS", [*ORDERS, Order("remember", "/orders/remember", remember, "retry")])
    return forms


async def test_a_form_of_this_site_with_its_token_is_taken_and_leads_back(
    an_order: list[dict[str, str]], outbox: Outbox
) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        answer = await send_form(client, "/orders/remember", {"back": "/dead?state=DEAD", "reason": "ö & ü"})
        evil = await send_form(client, "/orders/remember", {"back": "//evil.example/"})

    assert (answer.status_code, answer.headers["location"]) == (303, "/dead?state=DEAD")
    assert an_order[0]["reason"] == "ö & ü"
    assert evil.headers["location"] == "/"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin"}, 303),
        ({"sec-fetch-site": "cross-site", "origin": BASE}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": BASE}, 303),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({}, 303),
    ],
)
async def test_a_form_of_a_different_site_is_refused(
    headers: dict[str, str], status: int, an_order: list[dict[str, str]], outbox: Outbox
) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        await client.get("/")
        answer = await client.post("/orders/remember", data={"csrf": client.cookies["outboxio_csrf"]}, headers=headers)

    assert answer.status_code == status
    assert len(an_order) == (status == 303)


async def test_a_form_without_the_token_of_the_browser_is_refused(
    an_order: list[dict[str, str]], outbox: Outbox
) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        for fields in ({"csrf": ""}, {"csrf": "x" * 32}):
            refused = await send_form(client, "/orders/remember", fields)
            assert (refused.status_code, "too old" in refused.text) == (403, True)
        client.cookies.clear()
        client.cookies.set("outboxio_csrf", "")
        planted = await client.post("/orders/remember", data={"csrf": ""}, headers={"sec-fetch-site": "same-origin"})

    assert planted.status_code == 403
    assert an_order == []


async def test_a_form_that_is_too_large_or_no_form_is_refused(an_order: list[dict[str, str]], outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        large = await send_form(client, "/orders/remember", {"reason": "x" * 1_000_001})
        many = await send_form(client, "/orders/remember", {"id": [ID] * 2_001})
        json = await client.post("/orders/remember", json={"csrf": client.cookies["outboxio_csrf"]})

    assert [large.status_code, many.status_code, json.status_code] == [413, 413, 400]
    assert an_order == []


@pytest.mark.parametrize(
    "path", [None, "", "dead", "//evil.example", "/\\evil.example", "https://evil.example", "/\nx"]
)
def test_a_path_that_leads_elsewhere_is_not_a_way_back(path: str | None) -> None:
    assert checked_back(path) == "/"


# --- mounts and proxies ---------------------------------------------------------------------------


def in_fastapi(app: Any) -> Any:
    mounting = FastAPI()
    mounting.mount("/ops/outbox", app)
    return mounting


def in_starlette(app: Any) -> Any:
    return Starlette(routes=[Mount("/ops/outbox", app)])


def in_litestar(app: Any) -> Any:
    return Litestar([asgi("/ops/outbox", is_mount=True, copy_scope=True)(app)])


@pytest.mark.parametrize(
    ("mount", "root_path", "prefix"),
    [
        (in_fastapi, "", "/ops/outbox"),
        (in_starlette, "", "/ops/outbox"),
        (in_litestar, "", "/ops/outbox"),
        (in_starlette, "/shop", "/shop/ops/outbox"),  # a proxy that removes /shop
        (in_fastapi, "/shop", "/shop/ops/outbox"),
    ],
)
async def test_every_link_has_the_prefix_of_mount_and_proxy(
    mount: Callable[[Any], Any], root_path: str, prefix: str, an_order: list[dict[str, str]], outbox: Outbox
) -> None:
    app = mount(Dashboard(outbox, authorize=allow_all))
    async with browser(app, root_path=root_path) as client:
        overview = await client.get("/ops/outbox/")
        glossary = await client.get("/ops/outbox/glossary")
        [css] = re.findall(r'href="([^"]+outboxio\.css)"', overview.text)
        style = await client.get(css.removeprefix(root_path).removeprefix("/api"))
        cookie = overview.headers["set-cookie"]
        token = cookie.partition("=")[2].partition(";")[0]
        answer = await client.post(
            "/ops/outbox/orders/remember",
            data={"csrf": token, "back": "/glossary"},
            headers={"sec-fetch-site": "same-origin", "cookie": f"outboxio_csrf={token}"},
        )

    assert [overview.status_code, glossary.status_code, style.status_code] == [200, 200, 200]
    assert 'aria-current="page">Glossary' in glossary.text
    links = re.findall(r'(?:href|src|action)="(/[^"]*)"', overview.text)
    assert {link for link in links if not link.startswith(f"{prefix}/")} == set()
    assert f"Path={prefix};" in cookie
    assert answer.headers["location"] == f"{prefix}/glossary"


async def test_a_served_dashboard_needs_no_mount_and_its_address_may_lack_the_slash(outbox: Outbox) -> None:
    dashboard = Dashboard(outbox, authorize=allow_all)
    async with browser(dashboard, root_path="/outbox") as client:
        answers = [await client.get("/"), await client.get("/outbox"), await client.get("/outbox/glossary")]
    async with browser(in_litestar(dashboard)) as client:
        answers.append(await client.get("/ops/outbox"))

    assert [answer.status_code for answer in answers] == [200] * 4


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (TimeoutError(), 504, "within 2 s"),
        (DatabaseUnavailable("default", "db:5432", "refused"), 503, "Shard 'default'"),
        (ConfigurationError("there is no state 'DAED'"), 400, "There is no state 'DAED'"),
        (ZeroDivisionError("secret"), 500, "ZeroDivisionError"),
    ],
)
def test_an_error_becomes_a_page_with_its_sentence(
    error: Exception, status: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    view = view_of(error, "/dead")

    assert view.status == status
    assert told in view.facts.error  # type: ignore[attr-defined]
    assert "secret" not in str(view.facts)
    assert bool(caplog.records) == (status == 500)


async def test_a_page_that_fails_says_so_as_html_and_as_json(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        page, json = await client.get("/nothing"), await client.get("/nothing?format=json")
        wrong_method = await client.post("/glossary")
        hostile = await client.get("/%3Cscript%3E?x=%3Cscript%3E")

    assert (page.status_code, json.status_code, wrong_method.status_code) == (404, 404, 405)
    assert json.json()["error"] == "There is no such page."
    assert "<script>" not in hostile.text


# --- the rest -------------------------------------------------------------------------------------


def test_each_rule_about_tables_has_a_page_that_helps() -> None:
    pages = {rule.name: rule.see[0] for rule in RULES if rule.see is not None}
    assert pages.keys() == set(RULE_NAMES)
    assert set(pages.values()) <= {page.name for page in PAGES}


async def test_the_overview_has_the_verdict_as_html_and_the_same_facts_as_json(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        page, facts = await client.get("/"), (await client.get("/?format=json")).json()

    assert facts["overview"]["namespace"] == "shop"
    assert "All is well" in page.text
    assert facts["overview"]["verdict"][0].startswith("All is well")


async def test_a_database_that_does_not_answer_shows_the_fault_and_no_reassuring_zeros() -> None:
    async with (
        Outbox("postgresql://127.0.0.1:9/shop", namespace="shop") as outbox,
        browser(Dashboard(outbox, authorize=allow_all)) as client,
    ):
        overview, dead = await client.get("/"), await client.get("/dead")

    assert overview.status_code == 200
    assert "cannot be reached" in overview.text
    assert "does not answer" in overview.text
    assert "nothing is due" not in overview.text
    assert (dead.status_code, "cannot be reached" in dead.text) == (503, True)


@pytest.mark.parametrize("name", ["outboxio.js", "ids.js"])
def test_the_script_is_small_and_runs_no_text_as_code(name: str) -> None:
    script = (STATIC / name).read_text("utf-8")

    assert script.count("\n") <= 150
    assert re.findall(r"\beval\b|Function\(|innerHTML|document\.write|https?://", script) == []
