"""Redaction: what may be kept of a text that tells of a failure, or that a tool shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from outboxio.errors import ConfigurationError
from outboxio.notification import NotificationRecord
from outboxio.options import is_async

logger = logging.getLogger(__name__)

Redact = Callable[[str], str]
"""Answers what may be stored and shown of a text."""

_TEXTS = ("type", "message", "traceback")


def as_it_is(text: str) -> str:
    """Keeps everything: what applies where the application has not said otherwise."""
    return text


def checked_redact(redact: Redact | None) -> Redact:
    """A function that never fails and never lets a text through that ``redact`` has not seen to.

    Raises :class:`ConfigurationError` for what is no function of one text.
    """
    if redact is None:
        return as_it_is
    if not callable(redact) or is_async(redact):
        raise ConfigurationError(
            f"redact is {redact!r}; expected a function, not async, of a text that returns what may be kept of it"
        )

    def redacted(text: str) -> str:
        try:
            kept: Any = redact(text)
            if isinstance(kept, str):
                return kept
            reason = f"returned {type(kept).__name__}"
        except BaseException as broken:  # a function that is itself broken must not lose the row that failed
            reason = f"failed with {type(broken).__name__}"
        # Neither its message nor its traceback: they may well quote the text.
        logger.error("redact %s; what it was given is left out", reason)
        return f"<left out: redact {reason}>"

    return redacted


def redacted_record(record: NotificationRecord, redact: Redact) -> NotificationRecord:
    """The record as an operator may see it."""
    if redact is as_it_is:
        return record
    return replace(
        record,
        payload=_document(record.payload, redact),
        action_params=_document(record.action_params, redact) or {},
        headers=_document(record.headers, redact),
        errors=[_entry(entry, redact) for entry in record.errors],
    )


def _document(document: Any, redact: Redact) -> Any:
    """A JSON document, seen to as text; what is no object any more is shown as the text that it became."""
    if not document:
        return document
    text = redact(msgspec.json.encode(document).decode())
    try:
        decoded: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        decoded = None
    return cast(Any, decoded) if isinstance(decoded, dict) else {"redacted": text}


def _entry(entry: Mapping[str, Any], redact: Redact) -> dict[str, Any]:
    """An error: it may have been stored before there was anything to see to it."""
    kept: dict[str, Any] = {
        key: redact(value) if key in _TEXTS and isinstance(value, str) else value for key, value in entry.items()
    }
    if isinstance(kept.get("hook_of"), dict):
        kept["hook_of"] = _entry(kept["hook_of"], redact)
    return kept
