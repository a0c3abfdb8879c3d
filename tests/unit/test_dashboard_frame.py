"""The frame of the dashboard: authorization, permissions, forms of other sites, headers, mounts and proxies, errors."""

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
from outboxio.dashboard.app import FORM_ACTIONS, PAGES
from outboxio.dashboard.guard import HEADERS
from outboxio.dashboard.page_request import PageRequest, checked_back
from outboxio.dashboard.view import view_of
from outboxio.health.rules import RULE_NAMES, RULES
from outboxio.testing import memory_outbox
from tests.kit.dashboards import BASE, browser, send_form

pytestmark = pytest.mark.usefixtures("in_process", "patient_pages")

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


# --- permissions ----------------------------------------------------------------------------------


def test_a_dashboard_without_authorization_is_refused(outbox: Outbox) -> None:
    with pytest.raises(TypeError, match="authorize"):
        Dashboard(outbox)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=r"authorize is None; expected a function"):
        Dashboard(outbox, authorize=None)  # type: ignore[arg-type]


async def test_an_unauthorized_user_gets_404_for_every_path(outbox: Outbox) -> None:
    paths = [address_of(route.path) for route in PAGES] + ["/nothing", "/static/x/outboxio.css"]
    async with browser(Dashboard(outbox, authorize=with_access(None))) as client:
        answers = [await client.get(path) for path in paths]
        answers += [await client.post(action.path) for action in FORM_ACTIONS]

    assert {(answer.status_code, answer.text) for answer in answers} == {(404, "Not Found")}
    assert not client.cookies


@pytest.mark.parametrize("action", FORM_ACTIONS, ids=lambda action: action.path)
async def test_every_operation_is_refused_without_its_permission(action: Any, outbox: Outbox) -> None:
    others = Access("ada", set(RIGHTS) - {action.right})
    read_only = Dashboard(outbox, authorize=allow_all, read_only=True)
    for app in (Dashboard(outbox, authorize=with_access(others)), read_only):
        async with browser(app) as client:
            answer = await send_form(client, address_of(action.path))

        assert answer.status_code == 403, bad_words(answer)
        assert "does not have the right" in answer.text
    assert not await outbox.admin.operations()


@pytest.mark.parametrize("route", [route for route in PAGES if route.right != "view"], ids=lambda route: route.path)
async def test_every_protected_page_is_refused_without_the_permission(route: Any, outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=with_access(Access("ada", set(RIGHTS) - {route.right})))) as client:
        answer = await client.get(address_of(route.path))

    assert answer.status_code == 403, bad_words(answer)


@pytest.mark.parametrize("route", PAGES, ids=lambda route: route.path)
async def test_every_page_renders_without_operation_forms_for_a_viewer(route: Any, outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=with_access(Access.viewer("ada")))) as client:
        answer = await client.get(address_of(route.path))

    assert answer.status_code in (200, 400, 403, 404), bad_words(answer)
    assert 'method="post"' not in answer.text
    assert " style=" not in answer.text
    assert "<script>" not in answer.text


@pytest.mark.parametrize("action", FORM_ACTIONS, ids=lambda action: action.path)
async def test_every_operation_is_a_post(action: Any) -> None:
    assert action.right in RIGHTS
    assert action.right not in ("view", "payloads"), "an operation changes rows"


async def test_a_read_only_database_makes_the_dashboard_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: list[dict[str, str]]
) -> None:
    file = tmp_path / "shop.db"
    async with Outbox(f"sqlite:///{file}", namespace="shop") as outbox:
        await outbox.migrate()
        may_write = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != str(file) and may_write(path, mode))
        async with browser(Dashboard(outbox, authorize=allow_all)) as client:
            page = await client.get("/")
            answer = await send_form(client, "/operations/remember")

    assert "read only" in page.text
    assert answer.status_code == 403
    assert f"this process has no permission to write the file {file}" in answer.text
    assert submitted == []


async def test_authorize_may_be_async_and_may_return_a_response(outbox: Outbox) -> None:
    async def operators(request: Request) -> Access | RedirectResponse:
        if request.headers.get("x-user") is None:
            return RedirectResponse("/login", 302)
        return Access.operator(request.headers["x-user"])

    async with browser(Dashboard(outbox, authorize=operators)) as client:
        anonymous, operator = await client.get("/"), await client.get("/", headers={"x-user": "ada@example.org"})

    assert (anonymous.status_code, anonymous.headers["location"]) == (302, "/login")
    assert "ada@example.org" in operator.text


async def test_an_exception_of_authorize_reaches_the_surrounding_application(outbox: Outbox) -> None:
    def operators(request: Request) -> Access:
        raise HTTPException(401, "log in first")

    async with browser(in_fastapi(Dashboard(outbox, authorize=operators))) as client:
        answer = await client.get("/ops/outbox/")

    assert (answer.status_code, answer.json()) == (401, {"detail": "log in first"})


async def test_an_invalid_result_of_authorize_is_an_error_and_denies_access(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=lambda request: True)) as client:  # type: ignore[arg-type,return-value]
        with pytest.raises(ConfigurationError, match="authorize returned True; expected an Access"):
            await client.get("/")


async def test_basic_auth_requires_the_password_of_the_environment(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="OUTBOX_PASSWORD is not set"):
        basic_auth("ops", password_env="OUTBOX_PASSWORD")
    monkeypatch.setenv("OUTBOX_PASSWORD", "sesam: öffne dich")
    app = Dashboard(outbox, authorize=basic_auth("ops", password_env="OUTBOX_PASSWORD", access=Access.viewer))
    async with browser(app) as client:
        unauthenticated = await client.get("/")
        wrong = await client.get("/", headers={"authorization": "Basic b3BzOm9wcw=="})
        broken = await client.get("/", headers={"authorization": "Basic ?"})
        right = await client.get("/", auth=httpx.BasicAuth("ops", "sesam: öffne dich"))

    assert [one.status_code for one in (unauthenticated, wrong, broken, right)] == [401, 401, 401, 200]
    assert unauthenticated.headers["www-authenticate"].startswith("Basic realm=")


def test_permissions_are_validated() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no right 'rtery'; the rights are view, payloads, retry"):
        Access("ada", {"rtery"})
    with pytest.raises(ConfigurationError, match="actor"):
        Access("")
    assert Access("ada", {"retry"}).may("view")
    assert not Access.viewer("ada").may_operate
    assert {right for right in RIGHTS if not Access.operator("ada").may(right)} == {"purge", "unsubscribe"}
    assert Access.admin("ada").reading().can == {"view", "payloads"}


# --- headers and forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/nothing", "/glossary", "/?format=json"])
async def test_every_response_has_the_security_headers(path: str, outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        answer = await client.get(path)

    assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
    assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]


async def test_a_static_file_has_an_immutable_url_and_an_etag(outbox: Outbox) -> None:
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
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """An operation that only records its forms, at ``/operations/remember``."""
    from outboxio.dashboard import app
    from outboxio.dashboard.view import Done, FormAction

    forms: list[dict[str, str]] = []

    async def remember(page_request: PageRequest, form: Any) -> Done:
        forms.append(dict(form))
        return Done()

    monkeypatch.setattr(
        app, "FORM_ACTIONS", [*FORM_ACTIONS, FormAction("remember", "/operations/remember", remember, "retry")]
    )
    return forms


async def test_a_form_with_a_valid_token_is_accepted_and_redirects_back(
    submitted: list[dict[str, str]], outbox: Outbox
) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        answer = await send_form(client, "/operations/remember", {"back": "/dead?state=DEAD", "reason": "ö & ü"})
        evil = await send_form(client, "/operations/remember", {"back": "//evil.example/"})

    assert (answer.status_code, answer.headers["location"]) == (303, "/dead?state=DEAD")
    assert submitted[0]["reason"] == "ö & ü"
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
async def test_a_form_of_another_site_is_refused(
    headers: dict[str, str], status: int, submitted: list[dict[str, str]], outbox: Outbox
) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        await client.get("/")
        answer = await client.post(
            "/operations/remember", data={"csrf": client.cookies["outboxio_csrf"]}, headers=headers
        )

    assert answer.status_code == status
    assert len(submitted) == (status == 303)


async def test_a_form_without_the_token_of_the_browser_is_refused(
    submitted: list[dict[str, str]], outbox: Outbox
) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        for fields in ({"csrf": ""}, {"csrf": "x" * 32}):
            refused = await send_form(client, "/operations/remember", fields)
            assert (refused.status_code, "has expired" in refused.text) == (403, True)
        client.cookies.clear()
        client.cookies.set("outboxio_csrf", "")
        planted = await client.post(
            "/operations/remember", data={"csrf": ""}, headers={"sec-fetch-site": "same-origin"}
        )

    assert planted.status_code == 403
    assert submitted == []


async def test_an_oversized_or_malformed_form_is_refused(submitted: list[dict[str, str]], outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        large = await send_form(client, "/operations/remember", {"reason": "x" * 1_000_001})
        many = await send_form(client, "/operations/remember", {"id": [ID] * 2_001})
        json = await client.post("/operations/remember", json={"csrf": client.cookies["outboxio_csrf"]})

    assert [large.status_code, many.status_code, json.status_code] == [413, 413, 400]
    assert submitted == []


@pytest.mark.parametrize(
    "path", [None, "", "dead", "//evil.example", "/\\evil.example", "https://evil.example", "/\nx"]
)
def test_an_external_path_is_not_used_for_the_redirect(path: str | None) -> None:
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
    mount: Callable[[Any], Any], root_path: str, prefix: str, submitted: list[dict[str, str]], outbox: Outbox
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
            "/ops/outbox/operations/remember",
            data={"csrf": token, "back": "/glossary"},
            headers={"sec-fetch-site": "same-origin", "cookie": f"outboxio_csrf={token}"},
        )

    assert [overview.status_code, glossary.status_code, style.status_code] == [200, 200, 200]
    assert 'aria-current="page">Glossary' in glossary.text
    links = re.findall(r'(?:href|src|action)="(/[^"]*)"', overview.text)
    assert {link for link in links if not link.startswith(f"{prefix}/")} == set()
    assert f"Path={prefix};" in cookie
    assert answer.headers["location"] == f"{prefix}/glossary"


async def test_a_standalone_dashboard_accepts_a_url_without_the_slash(outbox: Outbox) -> None:
    dashboard = Dashboard(outbox, authorize=allow_all)
    async with browser(dashboard, root_path="/outbox") as client:
        answers = [await client.get("/"), await client.get("/outbox"), await client.get("/outbox/glossary")]
    async with browser(in_litestar(dashboard)) as client:
        answers.append(await client.get("/ops/outbox"))

    assert [answer.status_code for answer in answers] == [200] * 4


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (TimeoutError(), 504, "within 2 s"),
        (DatabaseUnavailable("default", "db:5432", "refused"), 503, "Shard 'default'"),
        (ConfigurationError("there is no state 'DAED'"), 400, "There is no state 'DAED'"),
        (ZeroDivisionError("secret"), 500, "ZeroDivisionError"),
    ],
)
def test_an_error_becomes_a_page_with_its_message(
    error: Exception, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    view = view_of(error, "/dead")

    assert view.status == status
    assert message in view.facts.error  # type: ignore[attr-defined]
    assert "secret" not in str(view.facts)
    assert bool(caplog.records) == (status == 500)


async def test_a_failing_page_is_reported_as_html_and_json(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        page, json = await client.get("/nothing"), await client.get("/nothing?format=json")
        wrong_method = await client.post("/glossary")
        hostile = await client.get("/%3Cscript%3E?x=%3Cscript%3E")

    assert (page.status_code, json.status_code, wrong_method.status_code) == (404, 404, 405)
    assert json.json()["error"] == "This page does not exist."
    assert "<script>" not in hostile.text


# --- further pages -------------------------------------------------------------------------------


def test_each_rule_about_tables_has_a_help_page() -> None:
    pages = {rule.name: rule.see[0] for rule in RULES if rule.see is not None}
    assert pages.keys() == set(RULE_NAMES)
    assert set(pages.values()) <= {page.name for page in PAGES}


async def test_the_overview_has_the_status_as_html_and_json(outbox: Outbox) -> None:
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        page, facts = await client.get("/"), (await client.get("/?format=json")).json()

    assert facts["overview"]["namespace"] == "shop"
    assert "All is well" in page.text
    assert facts["overview"]["verdict"][0].startswith("All is well")


async def test_an_unavailable_database_shows_the_fault_instead_of_zeros() -> None:
    async with (
        Outbox("postgresql://127.0.0.1:9/shop", namespace="shop") as outbox,
        browser(Dashboard(outbox, authorize=allow_all)) as client,
    ):
        overview, dead = await client.get("/"), await client.get("/dead")

    assert overview.status_code == 200
    assert "cannot be reached" in overview.text
    assert "does not respond" in overview.text
    assert "nothing is due" not in overview.text
    assert (dead.status_code, "cannot be reached" in dead.text) == (503, True)


@pytest.mark.parametrize("name", ["outboxio.js", "ids.js"])
def test_the_script_is_small_and_evaluates_no_text(name: str) -> None:
    script = (STATIC / name).read_text("utf-8")

    assert script.count("\n") <= 150
    assert re.findall(r"\beval\b|Function\(|innerHTML|document\.write|https?://", script) == []
