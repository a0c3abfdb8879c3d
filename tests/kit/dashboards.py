"""Clients of a dashboard, and forms as a browser sends them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import httpx
from msgspec.structs import replace

from outboxio.dashboard import app as app_module
from outboxio.dashboard import lists, page_request
from outboxio.health import collector

BASE = "http://outbox.test"
FORM = {"content-type": "application/x-www-form-urlencoded"}
_TOKEN = re.compile(r'name="csrf" value="([^"]+)"')


PATIENCE = 60.0


@contextmanager
def patient_pages() -> Iterator[None]:
    """Raise the timeouts of each page and overview created in the block to a minute, from 1 to 6 s.

    A machine that is busy, or that stops the process for some seconds, is not a database that does not answer.
    """
    pages = [replace(route, patience=PATIENCE) for route in app_module.PAGES]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(app_module, "PAGES", pages))
        for module in (page_request, lists, import_module("outboxio.dashboard.pages.overview")):
            stack.enter_context(mock.patch.object(module, "PATIENCE", PATIENCE))
        event = import_module("outboxio.dashboard.pages.events")
        stack.enter_context(mock.patch.object(event, "TREE_PATIENCE", PATIENCE))
        stack.enter_context(mock.patch.object(collector, "PATIENCE", PATIENCE))
        yield


@asynccontextmanager
async def browser(app: Any, *, root_path: str = "", **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client that keeps cookies. ``options``: of ``httpx.AsyncClient``."""
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url=BASE, **options) as client:
        yield client


async def send_form(
    client: httpx.AsyncClient, path: str, fields: Mapping[str, str | Sequence[str]] | None = None, *, page: str = "/"
) -> httpx.Response:
    """Send a form to a path, with the token of the cookie. ``page``: the page with the form."""
    if "outboxio_csrf" not in client.cookies:
        await client.get(page)
    data = {"csrf": client.cookies["outboxio_csrf"], "back": "/", **(fields or {})}
    return await client.post(path, data=data, headers={"sec-fetch-site": "same-origin"})


def token_of(page: str) -> str:
    """The token in the first form of a page."""
    found = _TOKEN.search(page)
    assert found is not None, "the page has no form with a token"
    return found[1]
