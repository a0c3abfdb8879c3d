"""What pages and orders return, and how they are registered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from msgspec import Struct

if TYPE_CHECKING:
    from outboxio.dashboard.asked import Asked
    from outboxio.dashboard.fields import Fields


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
    """The end of an order: where the browser goes."""

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


Page = Callable[["Asked"], Awaitable[View | Download]]
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
