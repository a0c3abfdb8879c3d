"""Headers that carry a trace from the writer of an event to the handlers, and from a handler to the events it emits."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from outboxio.support.codec import decode_object

TRACE_HEADERS = ("traceparent", "tracestate", "baggage", "sentry-trace")
"""The headers that an event of a handler takes from the handler's event. Other headers are not passed on."""

# From the name to the last digit of the flags. Quotes between name and value may be escaped, because the headers of a
# row may be a text in JSON. Character classes instead of the dots would take twice the time.
_SAMPLED = r"traceparent[^-]{3,9}-.{51}[13579bdf]"
sampled_in_text = re.compile(_SAMPLED).search
sampled_in_bytes = re.compile(_SAMPLED.encode()).search
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def headers_in(raw: bytes | msgspec.Raw) -> dict[str, Any]:
    """The headers of a row. Headers that are no JSON object, written by a different tool, count as no headers."""
    try:
        return decode_object(raw)
    except Exception:
        return {}


def carried(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a row that the events of its handler take over."""
    return {name: headers[name] for name in TRACE_HEADERS if isinstance(headers.get(name), str)}


def with_trace(headers: str | None, trace: Mapping[str, str], instead_of: Collection[str]) -> str | None:
    """The headers of an action, as JSON, with the headers of a trace in place of those that the action has."""
    kept = {} if headers is None else _decode(headers)
    merged = {name: value for name, value in kept.items() if name not in instead_of} | dict(trace)
    return msgspec.json.encode(merged).decode() if merged else None
