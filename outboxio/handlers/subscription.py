"""Subscriptions: the events that handlers want, as all processes write them into the database."""

from __future__ import annotations

from datetime import timedelta

from msgspec import Struct

LONGEST_UNSEEN = timedelta(minutes=1)
"""The longest time between two announcements of a process: a subscription deleted by mistake is soon back."""


OLDER_FOR = 2 * LONGEST_UNSEEN
"""A process of an older version that still runs has announced its handlers within this time."""


class Subscription(Struct, frozen=True, kw_only=True):
    """A row of ``subscriptions``: a handler that wants an event type, or all events on a topic.

    Either ``event_type`` or ``topic`` is set; the second value is the empty string.
    """

    handler_name: str
    event_type: str = ""
    topic: str = ""
    aliases: tuple[str, ...] = ()
    priority: int = 0
    ordered: bool = False
