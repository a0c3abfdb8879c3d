"""Subscriptions: which handlers want which events, as every instance tells the others."""

from __future__ import annotations

from msgspec import Struct


class Subscription(Struct, frozen=True, kw_only=True):
    """One row of ``subscriptions``: a handler that wants one event type, or everything on one topic.

    Exactly one of ``event_type`` and ``topic`` is set; the other is the empty string.
    """

    handler_name: str
    event_type: str = ""
    topic: str = ""
    aliases: tuple[str, ...] = ()
    priority: int = 0
    ordered: bool = False
