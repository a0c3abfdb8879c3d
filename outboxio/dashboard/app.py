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
from outboxio.dashboard.asked import Asked, Memory, Site, checked_back, with_field
from outboxio.dashboard.filters import Fields
from outboxio.dashboard.guard import PASSED, Guard, Passed, refuse_other_sites, refuse_wrong_token
from outboxio.dashboard.pages import ORDERS, PAGES
from outboxio.dashboard.showing import rendering
from outboxio.dashboard.showing.rendering import answered
from outboxio.dashboard.view import ORDER_PATIENCE, PATIENCE, Done, Order, Refused, Route, view_of
from outboxio.errors import ConfigurationError
from outboxio.outbox import Outbox
from outboxio.support.text import briefly

MOST_FORM = 1_000_000  # bytes
_Endpoint = Callable[[Request], Awaitable[Response]]


class Dashboard:
    """Pages on which operators see what is wrong, and mend the fault. An ASGI application to mount or to serve.

    ``authorize``: a function of the request, sync or async, that returns an
    :class:`~outboxio.dashboard.Access`, or ``None`` for a stranger, who gets 404. There is no default: who wants an
    open page writes ``authorize=allow_all``. ``read_only=True`` leaves out everything that changes rows. ``title``: the
    name at the top; by default the namespace. ``links``: addresses of the application's own tools, with
    ``{trace_id}``, ``{handler}`` or ``{event_id}``, such as ``{"trace": "https://grafana/{trace_id}"}``.

    Raises :class:`ConfigurationError` for an argument without a meaning.

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
        paths = {route.name: route.path for route in PAGES} | {order.name: order.path for order in ORDERS}
        rights = {order.name: order.right for order in ORDERS}
        self._site = Site(outbox, title or outbox.namespace, dict(links or {}), paths, rights, read_only, Memory())
        routes = [Path(route.path, self._page(route), methods=["GET"]) for route in PAGES]
        routes += [Path(order.path, self._order(order), methods=["POST"]) for order in ORDERS]
        routes += [Path(rendering.PATH, rendering.answer, methods=["GET"])]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._refused})
        app.router.redirect_slashes = False
        self._app = Guard(app, authorize)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    # --- inside ----------------------------------------------------------------------------------

    async def _asked(self, request: Request) -> Asked:
        passed: Passed = request.scope[PASSED]
        why_read_only, refused = await self._site.why_read_only(), await self._site.refused()
        return Asked(request, self._site, passed.access, passed.csrf, why_read_only, refused)

    def _page(self, route: Route) -> _Endpoint:
        async def page(request: Request) -> Response:
            asked = await self._asked(request)
            try:
                _refuse_without_right(asked, route.right)
                _refuse_query(asked)
                await self._site.refuse_unknown_namespace()
                async with asyncio.timeout(route.patience):
                    view = await route.function(asked)
                if isinstance(view, Done):
                    return _redirected(view, asked, asked.query)
                return await answered(view, asked)
            except Exception as error:
                return await _failed(error, asked, request, route.patience)

        return page

    def _order(self, order: Order) -> _Endpoint:
        async def carry_out(request: Request) -> Response:
            asked = await self._asked(request)
            try:
                refuse_other_sites(request)
                _refuse_query(asked)
                form = await _form(request)
                refuse_wrong_token(form.get("csrf"), asked.csrf)
                _refuse_without_right(asked, order.right)
                async with asyncio.timeout(ORDER_PATIENCE):
                    done = await order.function(asked, form)
                if isinstance(done, Done):
                    return _redirected(done, asked, form)
                return await answered(done, asked)
            except Exception as error:
                return await _failed(error, asked, request, ORDER_PATIENCE)

        return carry_out

    async def _refused(self, request: Request, error: Exception) -> Response:
        """A path without a page, or a method that the path does not answer."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        told = "There is no such page." if status == 404 else f"This address does not answer {request.method}."
        refused = Refused(status, told, "The overview has links to all pages.")
        return await _failed(refused, await self._asked(request), request)


def _refuse_without_right(asked: Asked, right: str) -> None:
    if not asked.access.may(right):
        told = f"{asked.access.actor} does not have the right `{right}` here."
        raise Refused(403, told, asked.why_read_only or "The function authorize of the dashboard gives the rights.")


def _refuse_query(asked: Asked) -> None:
    if asked.fault is not None:
        raise asked.fault


async def _failed(error: Exception, asked: Asked, request: Request, patience: float = PATIENCE) -> Response:
    without_did = Fields(pair for pair in asked.query.pairs() if pair[0] != "did")
    asked.query = without_did  # the page of an error asks the database nothing
    return await answered(view_of(await asked.admin.explained(error), request.scope["path"], patience), asked)


def _redirected(done: Done, asked: Asked, form: Fields) -> Response:
    location = checked_back(done.location or form.get("back"))
    if done.operation is not None:
        location = with_field(location, "did", done.operation)
    return RedirectResponse(asked.prefix + location, 303)


async def _form(request: Request) -> Fields:
    """The fields of a form. Raises :class:`Refused` for a form that is too large, or of a different kind."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(400, f"The form is of the kind {briefly(kind)}; expected application/x-www-form-urlencoded.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_FORM:
            raise Refused(
                413, f"The form is larger than {MOST_FORM:,} bytes.", "Order by a filter, not by single rows."
            )
    try:
        return Fields.parsed(body.decode("utf-8", "replace"))
    except ValueError:
        raise Refused(413, "The form has too many fields.", "Order by a filter, not by single rows.") from None
