"""The queries of operators on the tables of ``tests/kit/watched.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import State
from outboxio.model.operating.groups import PageCursor, Search
from outboxio.operations.queries.notifications import MAX_COUNTED, MAX_GROUPED
from outboxio.storage.protocols import BulkOperation
from tests.kit.watched import FIRST_POSITION, HANDLERS, NOW, OPERATION, ORDERED, PARTITIONS, SHARED

Query = Callable[[Any], Awaitable[Any]]
"""A query on a database of outboxio."""

DEAD = (State.DEAD, State.EXPIRED)
WAITING = (State.PENDING, State.FAILED)
PAGE = 50
ROW = UUID("01910000-0000-7000-8000-00000000000b")


class OperatorQueries:
    """The queries of the overview, lists, groups, probes and operations."""

    def __init__(self, total: int, *, most: int | None = None, counted: int = 1000) -> None:
        """``most``: the rows that a search may read, ``None``: the default. ``counted``: the bound of probes."""
        self._total = total
        self._most = most
        self._counted = counted
        self._names = [f"h{number:02}" for number in range(HANDLERS)]

    def all(self) -> dict[str, Query]:
        """The queries by name."""
        return {**self.probes(), **self.lists(), **self.counts(), **self.events()}

    def probes(self) -> dict[str, Query]:
        most, names = self._counted, self._names
        slots = [Slot(name) for name in names]
        slots += [Slot(name, part) for name in names[:SHARED] for part in range(1, PARTITIONS)]
        return {
            "due": lambda d: d.probes.due("app", slots, NOW, most),
            "blocked": lambda d: d.probes.blocked("app", [ORDERED, *names[:1]], most),
            "names of dead rows": lambda d: d.probes.dead_names("app"),
            "dead": lambda d: d.probes.dead("app", names, self._ago(3600), most),
            "parked keys": lambda d: d.probes.parked("app", [[ORDERED]], 100),
            "undelivered": lambda d: d.probes.undelivered("app", NOW, most),
            "namespaces": lambda d: d.subscriptions.namespaces(),
            "decisions and runs to cancel": lambda d: d.subscriptions.control_state("app", cancels=True),
            "unfinished names": lambda d: d.stored_notifications.unfinished_names("app"),
        }

    def lists(self) -> dict[str, Query]:
        middle = f"{FIRST_POSITION + timedelta(seconds=self._total // 2)}.000000"
        cases: dict[str, tuple[Search, PageCursor | None]] = {
            "dead, newest": (Search(states=DEAD), None),
            "dead, deep": (Search(states=DEAD), PageCursor("dead", "h03", (middle, str(OPERATION), "0"))),
            "dead, a handler": (Search(states=DEAD, names=("h05",)), None),
            "dead, in a minute": (Search(states=DEAD, since=self._ago(5060), until=self._ago(5000)), None),
            "dead, an error": (Search(states=DEAD, error=("ConnectionError", "8080")), None),
            "dead, a rare error": (Search(states=DEAD, error=("nobody's",)), None),
            "dead, a model": (Search(states=DEAD, model_id="none"), None),
            "waiting": (Search(states=WAITING), None),
            "waiting, a shared handler": (Search(states=WAITING, names=("h00",)), None),
            "waiting, a model": (Search(states=WAITING, model_id="none"), None),
            "blocked, first": (Search(states=(State.BLOCKED,)), None),
            "all, newest": (Search(), None),
            "all, a handler": (Search(names=("h05",)), None),
            "all, a model": (Search(model_id="none"), None),
            "succeeded, a type": (Search(states=(State.SUCCEEDED,), event_types=("T3",)), None),
            "a request": (Search(correlation_id="request-101"), None),
            "a large request": (Search(correlation_id="import"), None),
            "an action": (Search(action_id=UUID("01920000-0000-7000-8000-000000000007")), None),
        }

        def page(search: Search, after: PageCursor | None) -> Query:
            return lambda d: d.search.find("app", search, PAGE, after, most=self._most)

        dead, newest = Search(states=DEAD), (self._most or 10 * MAX_GROUPED) // 10
        return {
            **{name: page(search, after) for name, (search, after) in cases.items()},
            "groups": lambda d: d.search.last_errors("app", dead, newest, most=self._most),
            "cursor of a row": lambda d: d.search.cursor_of_notification("app", dead, ROW),
        }

    def counts(self) -> dict[str, Query]:
        cases = {
            "count dead": Search(states=DEAD),
            "count dead, an error": Search(states=DEAD, error=("ConnectionError",)),
            "count waiting": Search(states=WAITING),
            "count blocked": Search(states=(State.BLOCKED,)),
            "count all": Search(),
            "count a model": Search(model_id="none"),
        }

        def count(search: Search) -> Query:
            return lambda d: d.search.count("app", search, self._most or MAX_COUNTED, reads=self._most)

        handler = Search(states=DEAD, names=("h05",))
        return {
            **{name: count(search) for name, search in cases.items()},
            "count dead, a handler": lambda d: d.search.count("app", handler, self._counted),
        }

    def events(self) -> dict[str, Query]:
        none, most = Search(model_id="none"), self._most or 10_000
        ids = [UUID(f"01900000-0000-7000-8000-{number:012x}") for number in range(0, 100, 10)]
        return {
            "events, newest": lambda d: d.event_search.newest("app", Search(), PAGE),
            "events, a model": lambda d: d.event_search.newest("app", none, PAGE, most=most),
            "events by id": lambda d: d.event_search.events("app", ids),
            "events, without documents": lambda d: d.event_search.newest("app", Search(), PAGE, documents=False),
            "actions, newest": lambda d: d.event_search.newest_actions("app", Search(), PAGE, most=most),
            "actions, a model": lambda d: d.event_search.newest_actions("app", none, PAGE, most=most),
            "states of events": lambda d: d.event_search.states_of("app", ids),
            "caused by events": lambda d: d.event_search.caused_by("app", ids, 100),
            "notifications of events": lambda d: d.event_search.notifications_of("app", ids, 100),
        }

    def chunk(self) -> Query:
        """A chunk of a bulk operation, which changes rows."""
        search = Search(states=DEAD, until=NOW)
        return lambda d: d.search.change_chunk("app", BulkOperation("retry", OPERATION, "me", search), None, 500, NOW)

    def _ago(self, seconds: int) -> datetime:
        return FIRST_POSITION + timedelta(seconds=self._total - seconds)
