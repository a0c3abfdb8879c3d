"""The events and handlers of the chaos runs: one handler for each guarantee of outboxio."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from outboxio import Batch, Event, RetryPolicy

SOON = RetryPolicy(base="50ms", factor=1)


class Happened(Event):
    """The event of producers."""

    number: int


class Followed(Event):
    """The event that a handler emits."""

    number: int


class Kind(Struct, frozen=True, kw_only=True):
    """The kind of a handler, and its behaviour."""

    event: type[Event] = Happened
    options: Mapping[str, Any] = MappingProxyType({"retry": SOON})
    sleeps: float = 0.02
    """The longest run in seconds; one in twenty takes thirty times as long, which is longer than a heartbeat."""
    at_least: float = 0.0
    """The shortest run in seconds."""
    is_steady: bool = False
    """True if no run takes thirty times as long."""
    fails: float = 0.0
    """How often it fails."""
    dies: float = 0.0
    """How often it raises :class:`~outboxio.Unprocessable`."""
    emits: bool = False
    returns: float = 0.0
    """How often a batch handler returns some of its events as failed."""
    hook_fails: float | None = None
    """How often its ``on_dead`` hook fails; ``None`` for a handler without a hook."""
    is_everywhere: bool = True
    """False if some processes do not have the handler, so that events may have no notification of it."""
    name: str | None = None
    """The new name of a renamed handler."""

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
    def partitions(self) -> int:
        return int(self.options.get("partitions", 1))

    @property
    def in_batches(self) -> bool:
        return "batch" in self.options


_TRANSACTIONAL = {"retry": SOON, "delivery": "transactional"}
_ORDERED = {"retry": SOON, "ordered": True, "on_dead_key": "continue"}
_BATCH = Batch(size=10, max_wait="50ms")

HANDLERS: Mapping[str, Kind] = {
    "plain": Kind(),
    "flaky": Kind(fails=0.3, dies=0.02),
    # Its runs take longer than a freeze of their process, so that they end at the same time as those of its successor.
    "counts": Kind(options=_TRANSACTIONAL | {"timeout": "10s"}, sleeps=0.05, fails=0.1),
    "ordered": Kind(options=_ORDERED, fails=0.05, dies=0.01),
    "ordered-counts": Kind(options=_ORDERED | _TRANSACTIONAL, fails=0.05),
    "once": Kind(options={"delivery": "at_most_once"}, fails=0.05),
    "batch": Kind(options={"retry": SOON, "batch": _BATCH}, fails=0.05),
    "batch-counts": Kind(options=_TRANSACTIONAL | {"batch": _BATCH}, fails=0.05),
    "emits": Kind(emits=True, fails=0.1),
    "follows": Kind(event=Followed, sleeps=0.0),
    "shared": Kind(options={"retry": SOON, "partitions": 8}, fails=0.05),
    "shared-ordered": Kind(options=_ORDERED | {"partitions": 4}, fails=0.05, dies=0.01),
    "shared-counts": Kind(options=_ORDERED | _TRANSACTIONAL | {"partitions": 4, "total_concurrency": 16}, fails=0.05),
}

LINES: Mapping[str, Kind] = {
    "lines": Kind(options={"ordered": True, "partitions": 4}, at_least=0.003, sleeps=0.008, is_steady=True),
}
"""The handler of the long run of ``tests/chaos/partitions.py``."""

SETS = {"all": HANDLERS, "lines": LINES}
