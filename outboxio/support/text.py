"""Texts for errors, logs and terminals: values, misspelt names, URLs without passwords. Pure functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_LONGEST = 80
_MOST_LISTED = 12
_ALIKE = 0.8

# All characters between the scheme and the last @ of a word, because a password may contain unescaped characters.
_USERINFO = re.compile(r"://[^\s'\"]*@")
_OPTION = re.compile(r"([?&](?:ssl)?password=)[^\s&'\"]*", re.IGNORECASE)


def briefly(value: object) -> str:
    """The ``repr`` of a value for an error message: a single line of at most 80 characters. Never raises."""
    text = " ".join(spelled(value).splitlines())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def spelled(value: object) -> str:
    """The ``repr`` of a value, or a description if the ``repr`` raises."""
    try:
        return repr(value)
    except Exception:  # Python writes no integer of more than 4,300 digits; and a class may have any __repr__
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``; ``None`` if no known name is like ``name``."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def instead_of(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name that is most like ``name``, or up to 12 known names."""
    names = sorted(known)
    if meant := nearest(name, names):
        return f"did you mean {meant!r}?"
    if not names:
        return "there is none at all"
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"there is {', '.join(map(repr, names[:_MOST_LISTED]))}{more}"


def visible(text: str) -> str:
    """A text for a terminal, as a single line: characters that would move the cursor or change colours are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """The known name of which ``name`` is a misspelling; ``None`` if there is no such name.

    Stricter than ``difflib.get_close_matches``, because a correct name must pass: "delay" is no misspelling of "relay",
    because the first letter is seldom wrong, and neither is "reply".
    """
    return next((one for one in known if is_respelt(name, one) or _resembles(name, one)), None)


def is_respelt(name: str, known: str) -> bool:
    """True if both names have the same letters in a different order, or differ in capitals and underscores only."""
    return name != known and name[:1] == known[:1] and (
        sorted(name) == sorted(known) or _letters(name) == _letters(known)
    )  # fmt: skip


def _resembles(name: str, known: str) -> bool:
    return name != known and name[:1] == known[:1] and SequenceMatcher(None, name, known).ratio() > _ALIKE


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def without_passwords(text: str) -> str:
    """The text with ``***`` in place of users and passwords in URLs."""
    return _OPTION.sub(r"\1***", _USERINFO.sub("://***@", text))
