"""The filter of an operator: which notifications a list, a count or an order is about."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.notification import State


class Filter(Struct, frozen=True, kw_only=True):
    """The notifications of a list, a count, a group or an order. A notification matches if every given field matches.

    - ``states``: any of these states; empty for all states.
    - ``handler``: the name of a handler, which stands for the aliases too.
    - ``event_type``: the name of an event type.
    - ``ordering_key``, ``model_id``, ``correlation_id``: the exact text.
    - ``action``: the name of an action, or the id of a single execution.
    - ``error``: a part of the last error, in the form ``TypeName: message``. ``*`` stands for any text.
    - ``since``, ``until``: the moment of the last change, from ``since`` until before ``until``. For a DEAD
      notification the last change is the death.

    Example::

        from outboxio import Filter

        await outbox.admin.retry(Filter(states=("DEAD",), handler="invoice-pdf", error="ConnectionError: *pdf:8080"))
    """

    states: Sequence[State | str] = ()
    handler: str | None = None
    event_type: str | None = None
    ordering_key: str | None = None
    model_id: str | None = None
    action: str | UUID | None = None
    correlation_id: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class Search(Struct, frozen=True, kw_only=True):
    """A checked filter, as a database understands it. ``None`` and empty sequences match everything."""

    states: tuple[State, ...] = ()
    names: tuple[str, ...] | None = None
    """The stored handler names: the name of a handler, and its aliases."""
    event_types: tuple[str, ...] = ()
    """The stored names of an event type."""
    ordering_key: str | None = None
    model_id: str | None = None
    action_name: str | None = None
    action_id: UUID | None = None
    correlation_id: str | None = None
    error: tuple[str, ...] = ()
    """Texts that appear in the last error, ``TypeName: message``, in this order. The texts do not overlap."""
    since: datetime | None = None
    until: datetime | None = None


class Place(Struct, frozen=True, array_like=True):
    """A place in a walk over matching notifications: behind the row with these values. JSON can hold a place.

    ``walk``: the index that is walked. ``name``: the handler name within the walk, or the empty string. ``key``: the
    values of the index columns of the row, as texts.
    """

    walk: str
    name: str
    key: tuple[str, ...]
