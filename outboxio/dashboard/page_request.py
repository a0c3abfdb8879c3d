"""The request that pages and actions receive: outbox, user, and address."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

from msgspec import Struct
from starlette.requests import Request

from outboxio.dashboard.access import Access
from outboxio.dashboard.filters import MAX_FIELDS, Fields
from outboxio.dashboard.showing import rendering
from outboxio.dashboard.view import PATIENCE, Refused
from outboxio.operations.admin import Admin
from outboxio.outbox import Outbox
from outboxio.support import machine
from outboxio.support.text import briefly

ONCE = ("did", "format")
"""Query parameters that apply to a single response, and are not part of the page's address."""

MAX_KEPT = 60.0  # seconds after which a result is dropped, because a key may contain a user's filter

WEBHOOK_DELIVERY = "outboxio.WebhookDelivery"
"""The stored name of the events of outgoing webhooks, whose classes need ``outboxio[webhooks]``."""

T = TypeVar("T")

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


class Memory:
    """A cache of recent query results, shared by all users, so that ten open pages do not cost ten queries."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, Any]] = {}

    async def lately(self, key: str, fetch: Callable[[], Awaitable[T]], fresh: float) -> T:
        """Return the result with this key if it is at most ``fresh`` seconds old, or else fetch it."""
        read_at, answer = self._answers.get(key, (float("-inf"), None))
        if machine.monotonic() - read_at >= fresh:
            answer = await fetch()
            now = machine.monotonic()
            for old in [name for name, (since, _) in self._answers.items() if now - since > MAX_KEPT]:
                self._answers.pop(old, None)
            self._answers[key] = now, answer
        return cast(T, answer)


class Site(Struct, frozen=True):
    """What all requests to a dashboard share."""

    outbox: Outbox
    title: str
    links: Mapping[str, str]
    paths: Mapping[str, str]
    """The path of each page and action, by name."""
    rights: Mapping[str, str]
    """The right that each action requires, by name."""
    read_only: bool
    memory: Memory

    async def why_read_only(self) -> str | None:
        """Return why no operation is possible: by configuration, or refused by all databases; else ``None``."""
        if self.read_only:
            return "The dashboard was mounted with read_only=True."
        reasons = await self.memory.lately("read only", self._refused, fresh=30.0)
        if len(reasons) < len(self.outbox.statistics):
            return None
        return f"The database allows no operations: {'; '.join(dict.fromkeys(reasons.values()))}."

    async def refused(self) -> Mapping[str, str]:
        """Return the operations for which the database user lacks rights, by name, each with the reason."""
        return await self.memory.lately("refused", lambda: _in_time(self.outbox.admin.operations_refused()), fresh=30.0)

    async def refuse_unknown_namespace(self) -> None:
        """Raise :class:`Refused` if the namespace is misspelled."""
        unknown = await self.memory.lately("namespace", self.outbox.admin.unknown_namespace, fresh=30.0)
        if unknown is not None:
            message = f"{unknown[:1].upper()}{unknown[1:]}{'' if unknown.endswith('?') else '.'}"
            raise Refused(404, message, "Correct the namespace of the outbox that is passed to the dashboard.")

    async def _refused(self) -> Mapping[str, str]:
        return await _in_time(self.outbox.admin.operations_unavailable())


class PageRequest:
    """A user's request for a page or an action.

    Example::

        async def keys(request: PageRequest) -> View:
            found = await request.admin.keys(request.query.get("handler"), shard=request.shard)
            return View(template="keys.html", title="Parked keys", facts=found)
    """

    def __init__(
        self,
        request: Request,
        site: Site,
        access: Access,
        csrf: str,
        why_read_only: str | None,
        refused: Mapping[str, str],
    ) -> None:
        self.outbox = site.outbox
        self.access = access if why_read_only is None else access.reading()
        """The user's rights, without those that ``read_only`` or the database excludes."""
        self.why_read_only = why_read_only
        """Why no operation is possible, as a sentence; otherwise ``None``."""
        self.refused = {
            name: refused[name] for name, right in site.rights.items() if name in refused and self.access.may(right)
        }
        """The operations of this user for which the database user lacks rights, each with the reason."""
        self.csrf = csrf
        """The value of the hidden field ``csrf`` of each form."""
        self.path: Mapping[str, str] = request.path_params
        """The parameters in the path."""
        self.query, self.fault = _query_of(request)
        self.links = site.links
        self.title = site.title
        self.prefix: str = request.scope["root_path"]
        """The mount path, also behind a proxy, without a trailing slash."""
        # Browsers interpret a path that begins with two slashes as the address of another host.
        self._below: str = "/" + request.scope["path"].removeprefix(self.prefix).lstrip("/")
        self._paths = site.paths
        self._memory = site.memory

    @cached_property
    def admin(self) -> Admin:
        """The admin, acting as this user."""
        return self.outbox.admin.by(self.access.actor, origin="dashboard")

    def values(self, name: str) -> list[str]:
        """Return all values of a query parameter."""
        return self.query.all(name)

    @property
    def shards(self) -> list[str]:
        """The names of all shards."""
        return list(self.outbox.statistics)

    @property
    def shard(self) -> str | None:
        """The shard in the query. Raises :class:`Refused` for an unknown name."""
        name = self.query.get("shard")
        if name is not None and name not in self.shards:
            known = ", ".join(self.shards)
            raise Refused(400, f"There is no shard {briefly(name)}.", f"The shards are: {known}.")
        return name

    async def lately(self, key: str, fetch: Callable[[], Awaitable[T]], fresh: float = 2.0) -> T:
        """Return a result that is at most ``fresh`` seconds old, shared by all users. ``key``: names the query.

        Example::

            needs = await request.lately("needs", lambda: read_needs(request.admin))
        """
        return await self._memory.lately(key, fetch, fresh)

    # --- addresses -------------------------------------------------------------------------------

    def url(self, page: str, /, **fields: Any) -> str:
        """Return the address of a page. ``None`` is left out; a list becomes several parameters.

        Example::

            request.url("handler", name="invoice-pdf")
            request.url("dead", handler="invoice-pdf", state=["DEAD", "EXPIRED"])
        """
        return self.prefix + self.path_of(page, **fields)

    def path_of(self, page: str, /, **fields: Any) -> str:
        """Return the address of a page below the mount, for :class:`~outboxio.dashboard.view.Done`."""
        path = self._paths[page]
        for name in _PARAMETER.findall(path):
            path = re.sub(rf"\{{{name}(?::\w+)?\}}", quote(str(fields.pop(name)), safe="").replace("\\", "%5C"), path)
        return _with_query(path, _pairs(fields))

    def here(self, **changes: Any) -> str:
        """Return the address of this page with changed query parameters; ``None`` removes one.

        Example::

            request.here(after=page.next)
        """
        return self.prefix + self._here(changes)

    @property
    def back(self) -> str:
        """The value of the hidden field ``back`` of each form: this page, below the mount."""
        return self._here({})

    def asset(self, name: str) -> str:
        """Return the address of a file in ``static/``."""
        return self.prefix + rendering.address(name)

    def has(self, page: str) -> bool:
        """True if there is a page, or an action that the database allows, with this name."""
        return page in self._paths and page not in self.refused

    @property
    def sends_webhooks(self) -> bool:
        """True if a handler of this process sends webhooks."""
        return any(WEBHOOK_DELIVERY in handler.event_type_names for handler in self.outbox._handlers)  # pyright: ignore[reportPrivateUsage]  # the dashboard is part of outboxio

    def is_at(self, page: str) -> bool:
        """True if this is the page, or one below it."""
        path = self._paths[page]
        return self._below == path or (path != "/" and self._below.startswith(f"{path}/"))

    def _here(self, changes: Mapping[str, Any]) -> str:
        kept = [(name, value) for name, value in self.query.pairs() if name not in changes and name not in ONCE]
        return _with_query(quote(self._below, safe="/"), [*kept, *_pairs(changes)])


def _query_of(request: Request) -> tuple[Fields, Refused | None]:
    """Return the query parameters; or none, and the error to raise."""
    try:
        return Fields.parsed(request.scope["query_string"].decode("latin-1")), None
    except ValueError:
        return Fields(), Refused(414, f"The query has more than {MAX_FIELDS:,} parameters.", "Use a shorter address.")


async def _in_time(reasons: Awaitable[Mapping[str, str]]) -> Mapping[str, str]:
    try:
        async with asyncio.timeout(PATIENCE):
            return await reasons
    except Exception:  # the page queries the same database, and reports the error
        return {}


def checked_back(path: str | None) -> str:
    """Return a path from a form if it is below the mount, or else the path of the overview."""
    if path is None or not path.startswith("/") or path.startswith("//") or "\\" in path or not path.isprintable():
        return "/"
    return path


def with_field(path: str, name: str, value: object) -> str:
    """Return a path with another query parameter."""
    before, _, query = path.partition("?")
    try:
        pairs = [pair for pair in Fields.parsed(query).pairs() if pair[0] != name]
    except ValueError:  # more fields than any page has
        pairs = []
    return _with_query(before, [*pairs, (name, str(value))])


def _pairs(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in fields.items():
        values = cast("Iterable[Any]", value) if isinstance(value, list | tuple | set | frozenset) else (value,)
        pairs += [(name, str(each)) for each in values if each is not None]
    return pairs


def _with_query(path: str, pairs: list[tuple[str, str]]) -> str:
    return f"{path}?{urlencode(pairs, errors='replace')}" if pairs else path
