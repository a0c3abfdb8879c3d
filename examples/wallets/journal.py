"""Record each run of each handler, in an outbox that wraps its handlers."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from outboxio import Event, EventEnvelope, EventHandler, Outbox

Handle = Callable[[EventEnvelope[Any]], Awaitable[None]]


class Run(Struct):
    """A call of a handler."""

    seconds: float
    handler: str
    stored_as: str
    event: Event
    attempt: int
    error: Exception | None


class Journal:
    """All runs, in the order in which they finished."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.turn_page()

    def turn_page(self) -> None:
        """Begin a new page, and restart its clock."""
        self._began, self._first = time.monotonic(), len(self.runs)

    @property
    def page(self) -> list[Run]:
        """The runs of this page."""
        return self.runs[self._first :]

    def watching(self, name: str, handle: Handle) -> Handle:
        """Return the handler, wrapped so that its runs are recorded in the journal."""

        @functools.wraps(handle)
        async def noted(envelope: EventEnvelope[Any]) -> None:
            try:
                await handle(envelope)
            except Exception as error:
                self._note(name, envelope, error)
                raise
            self._note(name, envelope, None)

        return noted

    def _note(self, name: str, envelope: EventEnvelope[Any], error: Exception | None) -> None:
        seconds, stored_as = time.monotonic() - self._began, envelope.cause.handler_name
        self.runs.append(Run(seconds, name, stored_as, envelope.event, envelope.attempt, error))


class WatchedOutbox(Outbox):
    """An outbox that records the runs of all handlers in a journal."""

    def __init__(self, database: str, *, journal: Journal, **options: Any) -> None:
        super().__init__(database, **options)
        self._journal = journal

    def handler(self, *event_types: type[Event], name: str, **options: Any) -> Callable[[Any], Any]:
        register = super().handler(*event_types, name=name, **options)

        def watch_and_register(handle: Handle) -> Handle:
            register(self._journal.watching(name, handle))
            return handle

        return watch_and_register

    def add_handler(self, handler: EventHandler[Any]) -> None:
        vars(handler)["handle"] = self._journal.watching(handler.name, handler.handle)
        super().add_handler(handler)
