"""Redaction of texts that are stored, logged or shown, and descriptions of errors for the column ``errors``."""

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
from outboxio.loops.log_limiter import LogLimiter
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
    """Return the text unchanged: the default."""
    return text


def checked_redact(redact: Redact | None) -> Redact:
    """Wrap ``redact`` in a function that never raises, and never returns unredacted text.

    Raises :class:`ConfigurationError` if ``redact`` is not a plain function.
    """
    if redact is None:
        return keep_all
    if not callable(redact) or is_async(redact):
        raise ConfigurationError(
            f"redact is {briefly(redact)}; expected a function, not async, that takes a text and returns it redacted"
        )

    limiter = LogLimiter(logger)

    def redacted(text: str) -> str:
        try:
            kept: Any = redact(text)
            if isinstance(kept, str):
                return str.__str__(kept)  # a subclass of str could run any code when the text is used
            reason = f"returned {type(kept).__name__}"
        except BaseException as broken:  # an error in redact must not lose the failed row
            reason = f"failed with {type_name(broken)}"
        # Message and traceback are left out, because both may quote the text.
        if limiter.admits(reason, logging.ERROR):
            limiter.log(reason, logging.ERROR, "redact %s; omitting the text", reason)
        return f"<omitted: redact {reason}>"

    return redacted


def redacted_record(record: NotificationRecord, redact: Redact) -> NotificationRecord:
    """Return the record with redacted documents and errors."""
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
    """Return the job or operation with a redacted error. It may have been stored before ``redact`` was configured."""
    return row if redact is keep_all or row.error is None else replace(row, error=redact(row.error))


def redacted_document(document: Any, redact: Redact) -> Any:
    """Redact a JSON document as text. A result that is not a JSON object is returned as text."""
    if not document:
        return document
    text = redact(msgspec.json.encode(document).decode())
    try:
        decoded: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        decoded = None
    return cast(Any, decoded) if isinstance(decoded, dict) else {"redacted": text}


def redacted_text(text: str, redact: Redact) -> str:
    """Redact a JSON document in text form. Numbers keep all of their digits.

    Without ``redact`` the text is unchanged. Otherwise ``redact`` gets it without spaces, like all documents.
    """
    return text if redact is keep_all else redact(_without_spaces(text))


def _without_spaces(text: str) -> str:
    """Reformat a document as msgspec does, with unchanged numbers. Text that is not JSON is unchanged."""
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
    """Redact an entry of ``errors``, which may have been stored before ``redact`` was configured."""
    kept: dict[str, Any] = {
        key: redact(value) if key in _TEXTS and isinstance(value, str) else value for key, value in entry.items()
    }
    if isinstance(kept.get("hook_of"), dict):
        kept["hook_of"] = _entry(kept["hook_of"], redact)
    return kept


LONGEST_MESSAGE = 2_000  # characters of an error that are kept
LONGEST_TRACEBACK = 4_000
MAX_FRAMES = 6

_traceback_of: Any = BaseException.__dict__["__traceback__"]


class Description(Struct, frozen=True):
    """The description of an error: redacted type, message and short traceback, as texts that every database stores."""

    type: str
    message: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, redact: Redact = keep_all) -> Description:
        """Describe an error. Texts are redacted before they are truncated, so that ``redact`` sees each text whole."""
        trace = redact(_traceback(error))
        return cls(
            storable(redact(type_name(error)), LONGEST_MESSAGE),
            storable(redact(_message(error)), LONGEST_MESSAGE),
            storable(trace[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK),
        )

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Description:
        """Read the description from an entry of the column; missing or malformed parts are empty."""
        texts = {part: entry.get(part) for part in ("type", "message", "traceback")}
        return cls(**{part: text if isinstance(text, str) else "" for part, text in texts.items()})


def storable(text: str, longest: int) -> str:
    """Return text that every database stores: no NUL, no lone surrogates, and truncated."""
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
        return "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-MAX_FRAMES))
    except BaseException as broken:  # notes, causes or fields that raise
        stack = "".join(traceback.format_tb(_traceback_of.__get__(error), limit=-MAX_FRAMES))
        return f"{stack}{type_name(error)}: cannot be formatted further: {type_name(broken)}\n"
