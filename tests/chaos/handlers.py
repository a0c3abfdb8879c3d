"""The events and handlers of the chaos runs: one handler for each promise that outboxio makes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from outboxio import Batch, Event, RetryPolicy

SOON = RetryPolicy(base="50ms", factor=1)


class Happened(Event):
    """What producers say."""

    number: int


class Followed(Event):
    """What a handler says of what happened."""

    number: int


class Kind(Struct, frozen=True, kw_only=True):
    """What one handler is, and how it behaves."""

    event: type[Event] = Happened
    options: Mapping[str, Any] = MappingProxyType({"retry": SOON})
    sleeps: float = 0.02
    """Seconds that it takes at most; one in twenty takes thirty times as long, which is longer than a heartbeat."""
    fails: float = 0.0
    """How often it fails."""
    dies: float = 0.0
    """How often it says that an event can never be handled."""
    emits: bool = False

    @property
    def in_transaction(self) -> bool:
        return self.options.get("delivery") == "transactional"

    @property
    def only_once(self) -> bool:
        return self.options.get("delivery") == "at_most_once"

    @property
    def is_ordered(self) -> bool:
        return bool(self.options.get("ordered"))

    @property
    def in_batches(self) -> bool:
        return "batch" in self.options


_TRANSACTIONAL = {"retry": SOON, "delivery": "transactional"}
_ORDERED = {"retry": SOON, "ordered": True, "on_dead_key": "continue"}
_BATCH = Batch(size=10, max_wait="50ms")

HANDLERS: Mapping[str, Kind] = {
    "plain": Kind(),
    "flaky": Kind(fails=0.3, dies=0.02),
    # Its runs outlast their process being frozen, so that they end beside those of its successor.
    "counts": Kind(options=_TRANSACTIONAL | {"timeout": "10s"}, sleeps=0.05, fails=0.1),
    "ordered": Kind(options=_ORDERED, fails=0.05, dies=0.01),
    "ordered-counts": Kind(options=_ORDERED | _TRANSACTIONAL, fails=0.05),
    "once": Kind(options={"delivery": "at_most_once"}, fails=0.05),
    "batch": Kind(options={"retry": SOON, "batch": _BATCH}, fails=0.05),
    "batch-counts": Kind(options=_TRANSACTIONAL | {"batch": _BATCH}, fails=0.05),
    "emits": Kind(emits=True, fails=0.1),
    "follows": Kind(event=Followed, sleeps=0.0),
}
