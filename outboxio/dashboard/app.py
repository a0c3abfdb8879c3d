"""The dashboard as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from outboxio.dashboard.access import Authorize
from outboxio.dashboard.filters import Fields
from outboxio.dashboard.guard import PASSED, Guard, Passed, refuse_other_sites, refuse_wrong_token
from outboxio.dashboard.page_request import Memory, PageRequest, Site, checked_back, with_field
from outboxio.dashboard.pages import FORM_ACTIONS, PAGES
from outboxio.dashboard.showing import rendering
from outboxio.dashboard.showing.rendering import rendered_response
from outboxio.dashboard.view import ACTION_PATIENCE, PATIENCE, Done, FormAction, Refused, Route, view_of
from outboxio.errors import ConfigurationError
from outboxio.outbox import Outbox
from outboxio.support.text import briefly

MAX_FORM = 1_000_000  # bytes
#: The fix suggested for a form that is too large.
SELECT_BY_FILTER = "Select notifications by a filter instead of one by one."
_Endpoint = Callable[[Request], Awaitable[Response]]


class Dashboard:
    """Pages that show operators what is wrong, and let them fix it. An ASGI application to mount or to serve.

    ``authorize``: a function of the request, sync or async, that returns an :class:`~outboxio.dashboard.Access`, or
    ``None`` to respond with 404. There is no default; for an open dashboard, pass ``authorize=allow_all``.
    ``read_only=True`` disables all operations. ``title``: the name at the top; by default the namespace. ``links``:
    URLs of your own tools, with ``{trace_id}``, ``{handler}`` or ``{event_id}``, such as
    ``{"trace": "https://grafana/{trace_id}"}``.

    Raises :class:`ConfigurationError` for an invalid argument.

    Example::

        app.mount("/outbox", Dashboard(outbox, authorize=operators))  # FastAPI, Starlette
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        authorize: Authorize,
        read_only: bool = False,
        title: str | None = None,
        links: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(outbox, Outbox):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"Dashboard({briefly(outbox)}): expected an Outbox")
        if not callable(authorize):
            raise ConfigurationError(
                f"authorize is {briefly(authorize)}; expected a function of the request that returns an Access or None"
            )
        paths = {route.name: route.path for route in PAGES} | {action.name: action.path for action in FORM_ACTIONS}
        rights = {action.name: action.right for action in FORM_ACTIONS}
        self._site = Site(outbox, title or outbox.namespace, dict(links or {}), paths, rights, read_only, Memory())
        routes = [Path(route.path, self._page(route), methods=["GET"]) for route in PAGES]
        routes += [Path(action.path, self._action(action), methods=["POST"]) for action in FORM_ACTIONS]
        routes += [Path(rendering.PATH, rendering.answer, methods=["GET"])]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._refused})
        app.router.redirect_slashes = False
        self._app = Guard(app, authorize)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    # --- inside ----------------------------------------------------------------------------------

    async def _page_request(self, request: Request) -> PageRequest:
        passed: Passed = request.scope[PASSED]
        why_read_only, refused = await self._site.why_read_only(), await self._site.refused()
        return PageRequest(request, self._site, passed.access, passed.csrf, why_read_only, refused)

    def _page(self, route: Route) -> _Endpoint:
        async def page(request: Request) -> Response:
            page_request = await self._page_request(request)
            try:
                _refuse_without_right(page_request, route.right)
                _refuse_query(page_request)
                await self._site.refuse_unknown_namespace()
                async with asyncio.timeout(route.patience):
                    view = await route.function(page_request)
                if isinstance(view, Done):
                    return _redirected(view, page_request, page_request.query)
                return await rendered_response(view, page_request)
            except Exception as error:
                return await _failed(error, page_request, request, route.patience)

        return page

    def _action(self, action: FormAction) -> _Endpoint:
        async def carry_out(request: Request) -> Response:
            page_request = await self._page_request(request)
            try:
                refuse_other_sites(request)
                _refuse_query(page_request)
                form = await _form(request)
                refuse_wrong_token(form.get("csrf"), page_request.csrf)
                _refuse_without_right(page_request, action.right)
                async with asyncio.timeout(ACTION_PATIENCE):
                    done = await action.function(page_request, form)
                if isinstance(done, Done):
                    return _redirected(done, page_request, form)
                return await rendered_response(done, page_request)
            except Exception as error:
                return await _failed(error, page_request, request, ACTION_PATIENCE)

        return carry_out

    async def _refused(self, request: Request, error: Exception) -> Response:
        """Respond to an unknown path or an unsupported method."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = "This page does not exist." if status == 404 else f"This address does not support {request.method}."
        refused = Refused(status, message, "The overview has links to all pages.")
        return await _failed(refused, await self._page_request(request), request)


def _refuse_without_right(page_request: PageRequest, right: str) -> None:
    if not page_request.access.may(right):
        message = f"{page_request.access.actor} does not have the right `{right}` here."
        fix = page_request.why_read_only or "Rights are granted by the authorize function of the dashboard."
        raise Refused(403, message, fix)


def _refuse_query(page_request: PageRequest) -> None:
    if page_request.fault is not None:
        raise page_request.fault


async def _failed(
    error: Exception, page_request: PageRequest, request: Request, patience: float = PATIENCE
) -> Response:
    without_did = Fields(pair for pair in page_request.query.pairs() if pair[0] != "did")
    page_request.query = without_did  # an error page does not query the database
    view = view_of(await page_request.admin.explained(error), request.scope["path"], patience)
    return await rendered_response(view, page_request)


def _redirected(done: Done, page_request: PageRequest, form: Fields) -> Response:
    location = checked_back(done.location or form.get("back"))
    if done.operation is not None:
        location = with_field(location, "did", done.operation)
    return RedirectResponse(page_request.prefix + location, 303)


async def _form(request: Request) -> Fields:
    """Return the fields of a form. Raises :class:`Refused` for a form that is too large or has another content type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(400, f"The content type is {briefly(kind)}; expected application/x-www-form-urlencoded.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM:
            raise Refused(413, f"The form is larger than {MAX_FORM:,} bytes.", SELECT_BY_FILTER)
    try:
        return Fields.parsed(body.decode("utf-8", "replace"))
    except ValueError:
        raise Refused(413, "The form has too many fields.", SELECT_BY_FILTER) from None
