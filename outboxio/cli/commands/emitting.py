"""``outboxio emit``: records an event by hand, checked by the class of the event."""

from __future__ import annotations

from typing import Any

import msgspec

from outboxio.cli.answer import Exit
from outboxio.cli.commands.operations import Manner
from outboxio.cli.inside import types_of
from outboxio.cli.target import TargetError
from outboxio.model.payloads.classes import decoder_of
from outboxio.model.payloads.fields import field_names
from outboxio.outbox import Outbox
from outboxio.support.text import briefly


async def emit(outbox: Outbox, event_type: str, payload: str, action: str, manner: Manner) -> Exit:
    """Record one event. ``payload``: a JSON object, as handlers would read the object from the table."""
    event = _event(_class_of(outbox, event_type), event_type, payload)
    if manner.dry_run:
        return manner.said(f"emit would record {event_type}")
    async with outbox.transaction(action, {"event_type": event_type}) as tx:
        tx.emit(event)
    return manner.said(f"recorded {event_type}")


def _class_of(outbox: Outbox, event_type: str) -> type:
    known = types_of(outbox)
    if event_type not in known:
        told = ", ".join(sorted(known)) or "none, so name the outbox of your code: app.main:outbox"
        raise TargetError(f"no event class of this outbox has the type {briefly(event_type)}; its types: {told}")
    return known[event_type]


def _event(cls: type, event_type: str, payload: str) -> Any:
    """The event of a JSON text, decoded as for a handler."""
    try:
        msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise TargetError(
            f"the event is {briefly(payload)}; expected a JSON object of the fields, as in '{{\"order\": 7}}' ({error})"
        ) from error
    try:
        return decoder_of(cls)(payload)
    except Exception as error:  # a check of the application's own class may raise any error
        raise TargetError(f"this is no {event_type}: {error}; the fields are {_fields(cls)}") from error


def _fields(cls: Any) -> str:
    """The names of the fields of a class."""
    names = getattr(cls, "__struct_encode_fields__", None) or field_names(cls)
    return ", ".join(names) or "none"
