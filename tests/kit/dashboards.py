"""Clients of a dashboard, and forms as a browser sends them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

BASE = "http://outbox.test"
FORM = {"content-type": "application/x-www-form-urlencoded"}
_TOKEN = re.compile(r'name="csrf" value="([^"]+)"')


@asynccontextmanager
async def browser(app: Any, *, root_path: str = "", **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client that keeps cookies. ``options``: of ``httpx.AsyncClient``."""
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url=BASE, **options) as client:
        yield client


async def send_form(
    client: httpx.AsyncClient, path: str, fields: Mapping[str, str | Sequence[str]] | None = None, *, page: str = "/"
) -> httpx.Response:
    """Send a form to a path, with the token of the cookie. ``page``: where the form stands."""
    if "outboxio_csrf" not in client.cookies:
        await client.get(page)
    data = {"csrf": client.cookies["outboxio_csrf"], "back": "/", **(fields or {})}
    return await client.post(path, data=data, headers={"sec-fetch-site": "same-origin"})


def token_of(page: str) -> str:
    """The token in the first form of a page."""
    found = _TOKEN.search(page)
    assert found is not None, "the page has no form that orders"
    return found[1]
