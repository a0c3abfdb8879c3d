"""Descriptions: the parts of an error that the ``errors`` column keeps, for any error."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from outboxio.model.redaction import Redact, keep_all
from outboxio.support.log import type_name

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
