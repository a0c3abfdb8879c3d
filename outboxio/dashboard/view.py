"""What pages and actions return, and how they are registered."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from msgspec import Struct

from outboxio.errors import ConfigurationError, DatabaseUnavailable, OutboxError, RightsMissing, SchemaError
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.dashboard.filters import Fields
    from outboxio.dashboard.page_request import PageRequest


class View(Struct, frozen=True, kw_only=True):
    """A page: facts, and the template that shows them.

    Example::

        View(template="keys.html", title="Parked keys", facts=keys)
    """

    template: str
    title: str
    facts: object
    """The data of the template, and the response for ``?format=json``, encoded by msgspec."""
    shown: Mapping[str, object] = {}
    """Additional template variables that are not facts, such as links and selected values of a filter."""
    refreshes: bool = True
    """True if the script of the page refreshes it regularly."""
    status: int = 200


class Download(Struct, frozen=True, kw_only=True):
    """A file that the browser saves instead of a page."""

    name: str
    """The proposed name of the file: letters, digits, dots and hyphens."""
    content: bytes
    media_type: str = "application/json"


class Done(Struct, frozen=True, kw_only=True):
    """A redirect, after an action or from one page to another."""

    location: str = ""
    """A path below the mount, as ``request.path_of`` returns it; empty for the page with the form."""
    operation: UUID | None = None
    """The recorded operation. The next page shows its result once."""


class Refused(Exception):
    """An error that a page or an action shows. ``status``: of HTTP. ``fix``: what the user can do."""

    def __init__(self, status: int, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.fix = fix


Page = Callable[["PageRequest"], Awaitable[View | Download | Done]]
ActionFunction = Callable[["PageRequest", "Fields"], Awaitable[Done | View]]


class Route(Struct, frozen=True):
    """A page. ``path``: in Starlette's syntax, with ``{name}`` or ``{name:path}``."""

    name: str
    path: str
    function: Page
    right: str = "view"
    patience: float = 2.0
    """The seconds after which the query is cancelled, and the page reports a timeout."""


class FormAction(Struct, frozen=True):
    """A POST. The function takes the form, and returns :class:`Done`, or a :class:`View` that asks for confirmation."""

    name: str
    path: str
    function: ActionFunction
    right: str


# --- error pages ----------------------------------------------------------------------------------


logger = log_of(__name__)

PATIENCE = 2.0  # seconds for the queries of a page
ACTION_PATIENCE = 60.0  # seconds for an operation that runs within the request


class Fault(Struct, frozen=True):
    """The facts of an error page."""

    status: int
    error: str
    fix: str = ""


def view_of(error: Exception, where: str, patience: float = PATIENCE) -> View:
    """Return the page for an error. Logs unexpected errors, with the path ``where``."""
    fault = _fault(error, patience)
    if fault.status == 500:
        logger.log(logging.ERROR, "error in page %s", where, exc_info=error)
    title = _TITLES.get(fault.status, "Error")
    return View(template="error.html", title=title, facts=fault, status=fault.status, refreshes=fault.status >= 503)


_TITLES = {400: "Invalid request", 403: "Not allowed", 404: "Not found", 405: "Method not allowed", 413: "Too large",
           414: "Too large", 500: "Internal error", 503: "Database unavailable", 504: "Timeout"}  # fmt: skip


def _fault(error: Exception, patience: float) -> Fault:
    if isinstance(error, Refused):
        return Fault(error.status, error.message, error.fix)
    if isinstance(error, TimeoutError):
        return Fault(
            504,
            f"The database did not respond within {patience:.0f} s, and the query was cancelled.",
            "Narrow the filter: a handler, a state, a shorter period. The page Shards shows how fast the database is.",
        )
    if isinstance(error, DatabaseUnavailable):
        return Fault(503, _sentence(error), "The page retries automatically. Events and notifications are safe in the "
                     "database; processing continues when it is available again.")  # fmt: skip
    if isinstance(error, RightsMissing):
        return Fault(403, _sentence(error))
    if isinstance(error, SchemaError):
        return Fault(503, _sentence(error), "Run: outboxio migrate")
    if isinstance(error, ConfigurationError):
        return Fault(400, _sentence(error))
    if isinstance(error, OutboxError):
        return Fault(500, _sentence(error))
    return Fault(500, f"Unexpected error: {type(error).__name__}.", "See the log of the process for the traceback.")


def _sentence(error: Exception) -> str:
    text = str(error).strip()
    return text[:1].upper() + text[1:]
