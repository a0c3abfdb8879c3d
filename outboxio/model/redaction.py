"""Redaction of texts that are stored after a failure, logged, or shown by a tool.

Descriptions: the parts of an error that the ``errors`` column keeps, for any error.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import ConfigurationError
from outboxio.loops.flood import Flood
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.operation import JobRow, Operation
from outboxio.support.log import log_of, type_name
from outboxio.support.signature import is_async
from outboxio.support.text import briefly

logger = log_of(__name__)

Redact = Callable[[str], str]
"""Returns the part of a text that may be stored and shown."""

WithError = TypeVar("WithError", JobRow, Operation)

_TEXTS = ("type", "message", "traceback")


def keep_all(text: str) -> str:
    """Keeps all text: the default."""
    return text


def checked_redact(redact: Redact | None) -> Redact:
    """A function that never raises, and returns no text that ``redact`` has not returned.

    Raises :class:`ConfigurationError` if ``redact`` is no plain function of a text.
    """
    if redact is None:
        return keep_all
    if not callable(redact) or is_async(redact):
        raise ConfigurationError(
            f"redact is {briefly(redact)}; expected a function, not async, of a text that returns what may be kept of "
            "the text"
        )

    flood = Flood(logger)

    def redacted(text: str) -> str:
        try:
            kept: Any = redact(text)
            if isinstance(kept, str):
                return str.__str__(kept)  # a subclass of str could run any code when the text is used
            reason = f"returned {type(kept).__name__}"
        except BaseException as broken:  # a broken function must not lose the row that failed
            reason = f"failed with {type_name(broken)}"
        # Message and traceback are left out, because both may quote the text.
        if flood.admits(reason, logging.ERROR):
            flood.log(reason, logging.ERROR, "redact %s; what it was given is left out", reason)
        return f"<left out: redact {reason}>"

    return redacted


def redacted_record(record: NotificationRecord, redact: Redact) -> NotificationRecord:
    """The record with redacted documents and errors."""
    if redact is keep_all:
        return record
    return replace(
        record,
        payload=redacted_document(record.payload, redact),
        action_params=redacted_document(record.action_params, redact) or {},
        headers=redacted_document(record.headers, redact),
        errors=[_entry(entry, redact) for entry in record.errors],
    )


def redacted_error(row: WithError, redact: Redact) -> WithError:
    """The job or operation with a redacted error, which may have been stored before ``redact`` was configured."""
    return row if redact is keep_all or row.error is None else replace(row, error=redact(row.error))


def redacted_document(document: Any, redact: Redact) -> Any:
    """A JSON document, redacted as text. A result that is no JSON object is shown as text."""
    if not document:
        return document
    text = redact(msgspec.json.encode(document).decode())
    try:
        decoded: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        decoded = None
    return cast(Any, decoded) if isinstance(decoded, dict) else {"redacted": text}


def redacted_text(text: str, redact: Redact) -> str:
    """A JSON document as text, redacted. Numbers keep all of their digits.

    Without ``redact`` the text stays as it is. ``redact`` is given the document without spaces, like all documents.
    """
    return text if redact is keep_all else redact(_without_spaces(text))


def _without_spaces(text: str) -> str:
    """The document as msgspec writes documents, with numbers as they are. Text that is no JSON is unchanged."""
    try:
        decoded = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError):
        return text
    try:
        return msgspec.json.encode(decoded).decode()
    except (UnicodeError, RecursionError):  # a lone surrogate, which msgspec does not write
        return text


def _number(digits: str) -> msgspec.Raw:
    return msgspec.Raw(digits.encode())


def _entry(entry: Mapping[str, Any], redact: Redact) -> dict[str, Any]:
    """An entry of ``errors``. The entry may have been stored before ``redact`` was configured."""
    kept: dict[str, Any] = {
        key: redact(value) if key in _TEXTS and isinstance(value, str) else value for key, value in entry.items()
    }
    if isinstance(kept.get("hook_of"), dict):
        kept["hook_of"] = _entry(kept["hook_of"], redact)
    return kept


LONGEST_MESSAGE = 2_000  # characters of an error that are kept
LONGEST_TRACEBACK = 4_000
MOST_FRAMES = 6

_traceback_of: Any = BaseException.__dict__["__traceback__"]


class Description(Struct, frozen=True):
    """An error in words: redacted type, message and short traceback, as texts that every database stores."""

    type: str
    message: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, redact: Redact = keep_all) -> Description:
        """Describe an error. Texts are redacted before cutting, so that ``redact`` sees each text whole."""
        trace = redact(_traceback(error))
        return cls(
            storable(redact(type_name(error)), LONGEST_MESSAGE),
            storable(redact(_message(error)), LONGEST_MESSAGE),
            storable(trace[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK),
        )

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Description:
        """The description in an entry of the column; parts that were removed or replaced by hand are empty."""
        texts = {part: entry.get(part) for part in ("type", "message", "traceback")}
        return cls(**{part: text if isinstance(text, str) else "" for part, text in texts.items()})


def storable(text: str, longest: int) -> str:
    """Text that every database stores: no NUL, no lone surrogates, not endless."""
    clean = text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= longest else f"{clean[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def _message(error: BaseException) -> str:
    try:
        # str.__str__ gives a plain str: a subclass of str could run any code when the text is used.
        return str.__str__(str(error))
    except BaseException as broken:  # an exception with a failing __str__ must not lose the row
        return f"<unprintable: {type_name(broken)}>"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-MOST_FRAMES))
    except BaseException as broken:  # notes, causes or fields that cannot be read
        stack = "".join(traceback.format_tb(_traceback_of.__get__(error), limit=-MOST_FRAMES))
        return f"{stack}{type_name(error)}: the rest cannot be described: {type_name(broken)}\n"
