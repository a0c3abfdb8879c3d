"""Starlette: the outbox of a request, and responses for errors that the client may retry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from outboxio.errors import ConfigurationError, DatabaseUnavailable, StaleRecord
from outboxio.integrations.asgi import OriginMiddleware

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

__all__ = ["OriginMiddleware", "add_exception_handlers", "get_outbox"]

RETRY_AFTER = 1  # seconds


def get_outbox(request: HTTPConnection) -> Outbox:
    """Return the application's outbox: ``app.state.outbox``, which ``outbox.lifespan`` sets.

    Raises :class:`ConfigurationError` if the application has no outbox.
    """
    outbox: Outbox | None = getattr(request.app.state, "outbox", None)
    if outbox is None:
        raise ConfigurationError(
            "app.state.outbox is not set: create the application with lifespan=outbox.lifespan, or set "
            "app.state.outbox = outbox on a mounted application"
        )
    return outbox


def add_exception_handlers(app: Starlette) -> None:
    """Map errors of actions that an endpoint does not catch to responses other than 500.

    :class:`StaleRecord` becomes 409: the client should read the record again. :class:`DatabaseUnavailable`, including
    :class:`PoolExhausted`, becomes 503 with ``Retry-After``: the action was not committed.

    Example::

        app = FastAPI(lifespan=outbox.lifespan)
        add_exception_handlers(app)
    """
    app.add_exception_handler(StaleRecord, _conflict)
    app.add_exception_handler(DatabaseUnavailable, _unavailable)


async def _conflict(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "the record has been changed in the meantime; read it again"}, 409)


async def _unavailable(request: Request, error: Exception) -> Response:
    detail = "the database is unavailable; nothing was changed"
    return JSONResponse({"detail": detail}, 503, {"Retry-After": str(RETRY_AFTER)})
