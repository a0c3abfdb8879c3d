"""Live subscriptions, and the keys of fan-out (event types and topics) that live handlers want."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from outboxio.model.event import EventRecord


class Key(Struct, frozen=True):
    """An event type, or a topic, that a live handler wants."""

    sign: str
    """``#`` for a topic, nothing for an event type."""
    value: str
    is_ordered: bool
    """True if an ordered handler wants the key."""
    waits: bool
    """True if the key has undelivered events."""

    @property
    def name(self) -> str:
        """The key as :class:`FanoutRequest` and :class:`FanoutResult` name keys."""
        return f"{self.sign}{self.value}"


class LiveSubscription(Struct, frozen=True, array_like=True):
    """A handler that wants an event type or a topic, as ``SUBSCRIPTIONS`` in ``fanout.py`` reads subscriptions."""

    handler_name: str
    event_type: str
    topic: str
    priority: int
    ordered: int
    aliases: str
    seen: str
    partitions: int

    @property
    def key(self) -> tuple[str, str]:
        return ("#", self.topic) if self.topic else ("", self.event_type)


_live = msgspec.json.Decoder(list[LiveSubscription]).decode
strings = msgspec.json.Decoder(list[str]).decode


def subscribed(found: Iterable[tuple[str]]) -> Sequence[LiveSubscription]:
    """The live subscriptions that get new notifications: all but the subscriptions of an alias of a live handler.

    After a rename that was taken back, two names are aliases of each other: the name that was seen later counts.
    """
    live = _live(f"[{','.join([text for (text,) in found])}]")
    newest: dict[tuple[str, str], str] = {}
    for s in live:
        for alias in strings(s.aliases) if s.aliases != "[]" else ():
            newest[s.handler_name, alias] = max(s.seen, newest.get((s.handler_name, alias), ""))
    replaced = {
        alias for (name, alias), seen in newest.items() if (newest.get((alias, name), ""), alias) <= (seen, name)
    }
    return [s for s in live if s.handler_name not in replaced]


def keys_of(events: Iterable[EventRecord], subscriptions: Sequence[LiveSubscription]) -> dict[str, str]:
    """The ids of the events that a live handler wants, each with the name of the key; the event type goes first."""
    wanted = {s.key for s in subscriptions}
    keys: dict[str, str] = {}
    for event in events:
        if event.event_type is not None and ("", event.event_type) in wanted:
            keys[str(event.id)] = event.event_type
        elif event.topic is not None and ("#", event.topic) in wanted:
            keys[str(event.id)] = f"#{event.topic}"
    return keys
