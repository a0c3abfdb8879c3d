"""``outboxio emit``: record an event by hand, validated by its class."""

from __future__ import annotations

from typing import Any

import msgspec

from outboxio.cli.commands.operations import OutputFormat
from outboxio.cli.internals import types_of
from outboxio.cli.output import Exit
from outboxio.cli.target import TargetError
from outboxio.model.payloads.classes import decoder_of
from outboxio.model.payloads.fields import field_names
from outboxio.outbox import Outbox
from outboxio.support.text import briefly


async def emit(outbox: Outbox, event_type: str, payload: str, action: str, output: OutputFormat) -> Exit:
    """Record one event. ``payload``: the JSON object that the table stores."""
    event = _event(_class_of(outbox, event_type), event_type, payload)
    if output.dry_run:
        return output.printed(f"would record {event_type}")
    async with outbox.transaction(action, {"event_type": event_type}) as tx:
        tx.emit(event)
    return output.printed(f"recorded {event_type}")


def _class_of(outbox: Outbox, event_type: str) -> type:
    known = types_of(outbox)
    if event_type not in known:
        names = ", ".join(sorted(known)) or "none; name an outbox in your code, as in app.main:outbox"
        raise TargetError(f"this outbox has no event type {briefly(event_type)}; its types: {names}")
    return known[event_type]


def _event(cls: type, event_type: str, payload: str) -> Any:
    """Return the event of a JSON text, decoded as for a handler."""
    try:
        msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise TargetError(
            f"invalid event {briefly(payload)}; expected a JSON object with its fields, as in '{{\"id\": 7}}' ({error})"
        ) from error
    try:
        return decoder_of(cls)(payload)
    except Exception as error:  # validation in your class may raise any error
        raise TargetError(f"invalid {event_type}: {error}; its fields: {_fields(cls)}") from error


def _fields(cls: Any) -> str:
    """Return the field names of a class."""
    names = getattr(cls, "__struct_encode_fields__", None) or field_names(cls)
    return ", ".join(names) or "none"
