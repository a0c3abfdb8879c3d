"""The guard in front of all pages: mount path, authorization, CSRF protection, and response headers."""

from __future__ import annotations

import hmac
import inspect
import secrets
from collections.abc import Mapping
from http.cookies import SimpleCookie
from typing import cast
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outboxio.dashboard.access import Access, Allowed, Authorize
from outboxio.dashboard.view import Refused
from outboxio.errors import ConfigurationError
from outboxio.support.text import briefly

COOKIE = "outboxio_csrf"
PASSED = "outboxio.passed"

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    # no-referrer would make browsers send "Origin: null" with the forms of these pages
    "referrer-policy": "same-origin",
    "x-robots-tag": "noindex",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""The default headers of every response."""


class Passed(Struct, frozen=True):
    """The result of the guard's checks, passed to the page."""

    access: Access
    csrf: str


class Guard:
    """An ASGI application that lets the requests of allowed users pass to the pages."""

    def __init__(self, app: ASGIApp, authorize: Authorize) -> None:
        self._app = app
        self._authorize = authorize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        scope = below_mount(scope)
        answer = _Response(send, scope)
        found = await self._found(Request(scope, receive))
        if isinstance(found, Access):
            scope[PASSED] = Passed(found, answer.csrf)
            await self._app(scope, receive, answer.send)
        else:
            response = PlainTextResponse("Not Found", 404) if found is None else found
            await response(scope, receive, answer.send_without_cookie)

    async def _found(self, request: Request) -> Allowed:
        if _host_of(f"http://{request.headers.get('host', '')}") is None:
            # Code that reads ``request.url``, such as an ``authorize`` function, would raise.
            return PlainTextResponse("Invalid Host header.\n", 400)
        found = self._authorize(request)
        allowed = await found if inspect.isawaitable(found) else found
        if allowed is not None and not isinstance(allowed, Access | Response):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(
                f"authorize returned {briefly(allowed)}; expected an Access, None, or a Starlette response"
            )
        return allowed


class _Response:
    """Adds headers and the CSRF cookie to a response."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self._received = _cookie(scope)
        self.csrf = self._received or secrets.token_urlsafe(24)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._received is None:
            self._headers(message).append("set-cookie", self._set_cookie())
        await self.send_without_cookie(message)

    async def send_without_cookie(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = self._headers(message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    def _headers(self, message: Message) -> MutableHeaders:
        return MutableHeaders(scope=message)

    def _set_cookie(self) -> str:
        secure = "; Secure" if self._scope.get("scheme") == "https" else ""
        path = quote(self._scope["root_path"], safe="/") or "/"
        return f"{COOKIE}={self.csrf}; Path={path}; HttpOnly; SameSite=Strict{secure}"


def refuse_other_sites(request: Request) -> None:
    """Raise :class:`Refused` for a form that was sent from another site, according to the browser's headers."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:  # an older browser, or HTTP without TLS
        origin = request.headers.get("origin")
        is_own = origin is None or _host_of(origin) == request.headers.get("host")
    if not is_own:
        raise Refused(
            403,
            "The form was sent from another site.",
            "If the dashboard is behind a proxy, the proxy must pass on the Host header unchanged.",
        )


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def refuse_wrong_token(received: str | None, expected: str) -> None:
    """Raise :class:`Refused` for a form without the token of this browser."""
    if not hmac.compare_digest((received or "").encode(), expected.encode()):
        raise Refused(
            403,
            "The form has expired: the browser has since received a newer token.",
            "Go back, reload the page, and send the form again.",
        )


def below_mount(scope: Scope) -> Scope:
    """Return the scope with the whole mount path in ``root_path``, and a ``path`` that starts with ``root_path``.

    Frameworks differ. Starlette and FastAPI keep the mount path in ``path``, and a proxy may have removed its start.
    Litestar removes the mount path from ``path``, does not add it to ``root_path``, and adds a trailing slash.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    full_path = unquote((scope.get("raw_path") or b"").decode("latin-1").partition("?")[0]).rstrip("/")
    removed = full_path.removesuffix(path.rstrip("/"))
    if full_path and removed and removed != full_path and path.rstrip("/") != full_path:
        root, below = removed if removed.startswith(root) else root + removed, path.rstrip("/")
    elif full_path and path == "/":
        root, below = full_path if full_path.startswith(root) else root + full_path, path
    else:
        below = _without_end_of(root, path)
    return {**scope, "root_path": root, "path": root + (below or "/")}


def _without_end_of(root: str, path: str) -> str:
    """Return the path without the longest end of ``root`` that it starts with."""
    parts = root.split("/")[1:]
    for start in range(len(parts)):
        end = "/" + "/".join(parts[start:])
        if path == end or path.startswith(f"{end}/"):
            return path[len(end) :]
    return path


def _cookie(scope: Scope) -> str | None:
    """The token in the cookies of the request."""
    for name, value in cast("list[tuple[bytes, bytes]]", scope["headers"]):
        if name == b"cookie":
            try:
                morsel = SimpleCookie(value.decode("latin-1")).get(COOKIE)
            except Exception:
                return None
            if morsel is not None and len(morsel.value) >= 32:
                return morsel.value
    return None
