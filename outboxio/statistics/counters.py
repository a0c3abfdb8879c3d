"""Counters: how many notifications of each state this process has settled."""

from __future__ import annotations

from msgspec import Struct

from outboxio.model.notification import State


class Counters(Struct):
    """The work of this process since the shard was started."""

    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    dead: int = 0
    skipped: int = 0
    dying: int = 0
    """Verdicts and failed hooks: the hook is still owed."""
    refused: int = 0
    """Outcomes that the fence refused: a second process holds the handler now, or the row was settled already."""
    stuck: int = 0
    standstills: int = 0
    """How often the event loop stood still for about a second or longer."""

    def count(self, state: State, number: int) -> None:
        name = state.lower()
        setattr(self, name, getattr(self, name) + number)
