"""What pages and orders return, and how they are registered."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from msgspec import Struct

from outboxio.errors import ConfigurationError, DatabaseUnavailable, OutboxError, RightsMissing, SchemaError
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.dashboard.asked import Asked
    from outboxio.dashboard.filters import Fields


class View(Struct, frozen=True, kw_only=True):
    """A page: facts, and the template that shows the facts.

    Example::

        View(template="keys.html", title="Parked keys", facts=keys)
    """

    template: str
    title: str
    facts: object
    """The template sees ``facts``, and ``?format=json`` answers the facts, encoded by msgspec."""
    shown: Mapping[str, object] = {}
    """Further variables of the template, which are no facts: links, chosen values of a filter."""
    refreshes: bool = True
    """True if the script of the page refreshes the page now and again."""
    status: int = 200


class Download(Struct, frozen=True, kw_only=True):
    """A file that the browser saves instead of a page."""

    name: str
    """The proposed name of the file: letters, digits, dots and hyphens."""
    content: bytes
    media_type: str = "application/json"


class Done(Struct, frozen=True, kw_only=True):
    """Where the browser goes: after an order, or from a page that leads to another."""

    location: str = ""
    """A path below the mount, as ``asked.path_of`` returns it; empty for the page on which the form stood."""
    operation: UUID | None = None
    """The recorded order. The next page shows once what was done."""


class Refused(Exception):
    """A page or an order refuses. ``status``: of HTTP. ``remedy``: what the user can do."""

    def __init__(self, status: int, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.remedy = remedy


Page = Callable[["Asked"], Awaitable[View | Download | Done]]
Ordered = Callable[["Asked", "Fields"], Awaitable[Done | View]]


class Route(Struct, frozen=True):
    """A page. ``path``: as Starlette understands it, with ``{name}`` or ``{name:path}``."""

    name: str
    path: str
    function: Page
    right: str = "view"
    patience: float = 2.0
    """The seconds after which the question is ended, and the page says so."""


class Order(Struct, frozen=True):
    """A POST. The function gets the form, and returns :class:`Done`, or a :class:`View` that asks for confirmation."""

    name: str
    path: str
    function: Ordered
    right: str


# --- from an error to a page that says the error, and the remedy ----------------------------------


logger = log_of(__name__)

PATIENCE = 2.0  # seconds for the questions of a page
ORDER_PATIENCE = 60.0  # seconds for an order that is carried out in the request


class Fault(Struct, frozen=True):
    """The facts of an error page."""

    status: int
    error: str
    remedy: str = ""


def view_of(error: Exception, where: str, patience: float = PATIENCE) -> View:
    """The page for an error. An unexpected error is logged. ``where``: the path, for the log."""
    fault = _fault(error, patience)
    if fault.status == 500:
        logger.log(logging.ERROR, "the page %s has failed", where, exc_info=error)
    title = _TITLES.get(fault.status, "Something is wrong")
    return View(template="error.html", title=title, facts=fault, status=fault.status, refreshes=fault.status >= 503)


_TITLES = {400: "The question cannot be answered", 403: "Not allowed", 404: "Not found", 405: "Not allowed here",
           413: "Too large", 414: "Too large", 500: "The page has failed", 503: "No answer",
           504: "Too slow"}  # fmt: skip


def _fault(error: Exception, patience: float) -> Fault:
    if isinstance(error, Refused):
        return Fault(error.status, error.message, error.remedy)
    if isinstance(error, TimeoutError):
        return Fault(
            504,
            f"The database has not answered within {patience:.0f} s, and the question was ended.",
            "Narrow the filter: a handler, a state, a shorter time. The page Shards shows how fast the database is.",
        )
    if isinstance(error, DatabaseUnavailable):
        return Fault(503, _sentence(error), "The page asks again by itself. Events and notifications are safe in the "
                     "database: work goes on when the database answers.")  # fmt: skip
    if isinstance(error, RightsMissing):
        return Fault(403, _sentence(error))
    if isinstance(error, SchemaError):
        return Fault(503, _sentence(error), "Run: outboxio migrate")
    if isinstance(error, ConfigurationError):
        return Fault(400, _sentence(error))
    if isinstance(error, OutboxError):
        return Fault(500, _sentence(error))
    return Fault(500, f"The page has failed: {type(error).__name__}.", "The log of the process has the traceback.")


def _sentence(error: Exception) -> str:
    text = str(error).strip()
    return text[:1].upper() + text[1:]
