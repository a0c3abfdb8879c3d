"""Texts for errors, logs and terminals: values, misspelled names, URLs without passwords. Pure functions.

Also the text encodings of databases, some of which have only a few hundred characters.
"""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache

from msgspec import Struct

_MAX_LENGTH = 80
_CUT = " (\N{HORIZONTAL ELLIPSIS})"  # clearer than "..." if the sentence continues
_MAX_LISTED = 12
_ALIKE = 0.8

# Everything between the scheme and the last @, because a password may contain unescaped characters.
_USERINFO = re.compile(r"://[^\s'\"]*@")
_OPTION = re.compile(r"([?&](?:ssl)?password=)[^\s&'\"]*", re.IGNORECASE)


def briefly(value: object) -> str:
    """Return the ``repr`` of a value for errors, on a single line of at most 80 characters. Never raises."""
    text = " ".join(spelled(value).splitlines())
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def cut_at_word(text: str, longest: int) -> str:
    """Cut a text at the end of a word: ``the server closed the connection for (…)``."""
    if len(text) <= longest:
        return text
    start, space, _ = text[: longest - len(_CUT) + 1].rpartition(" ")
    # A single word may be longer, such as a URL.
    kept = start if space and len(start) > longest // 2 else text[: longest - len(_CUT)]
    return f"{kept.rstrip(' .,:;')}{_CUT}"


def spelled(value: object) -> str:
    """Return the ``repr`` of a value, or a description if ``repr`` raises."""
    try:
        return repr(value)
    except Exception:  # integers of more than 4,300 digits, or any __repr__ of a class
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to ``name``; ``None`` if none is similar."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the most similar known name, or up to 12 known names."""
    names = sorted(known)
    if meant := nearest(name, names):
        return f"did you mean {meant!r}?"
    if not names:
        return "there are none"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"known names are {', '.join(map(repr, names[:_MAX_LISTED]))}{more}"


def visible(text: str) -> str:
    """Escape characters that would move the cursor or change colors, for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def visible_json(text: str) -> str:
    """Escape unprintable characters of a JSON document as ``\\uXXXX``, for a terminal."""
    return "\n".join(map(_visible_json_line, text.split("\n")))


def _visible_json_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which ``name`` is probably a misspelling, or ``None``.

    Stricter than ``difflib.get_close_matches``, because correct names must pass: neither "delay" nor "reply" is a
    misspelling of "relay". The first letter is seldom wrong.
    """
    return next((one for one in known if is_respelt(name, one) or _resembles(name, one)), None)


def is_respelt(name: str, known: str) -> bool:
    """Return True if the names have the same letters in a different order, or differ only in case and underscores."""
    return name != known and name[:1] == known[:1] and (
        sorted(name) == sorted(known) or _letters(name) == _letters(known)
    )  # fmt: skip


def _resembles(name: str, known: str) -> bool:
    return name != known and name[:1] == known[:1] and SequenceMatcher(None, name, known).ratio() > _ALIKE


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def without_passwords(text: str) -> str:
    """Replace users and passwords in URLs by ``***``."""
    return _OPTION.sub(r"\1***", _USERINFO.sub("://***@", text))


# --- encodings -------------------------------------------------------------------------------

UTF8MB3 = "utf8mb3"
"""Stands for UTF-8 of at most three bytes, for which Python has no codec."""

_ESCAPED_IN_JSON = "outboxio.escaped_in_json"


class TextEncoding(Struct, frozen=True):
    """The encoding of a database."""

    name: str = "UTF-8"
    """The database's name of the encoding."""
    codec: str | None = None
    """The Python codec with the same characters, or ``UTF8MB3``; ``None`` if every text can be stored."""

    def lacking(self, text: str) -> str | None:
        """Return the first character that the database cannot store, or ``None``."""
        if self.codec is None:
            return None
        if self.codec == UTF8MB3:
            return next((character for character in text if character > "\uffff"), None)
        try:
            text.encode(self.codec)
        except UnicodeEncodeError as error:
            return text[error.start]
        return None

    def escaped(self, text: str) -> str:
        """Escape each character that the database cannot store."""
        return text if self.codec is None else text.encode(self.codec, "backslashreplace").decode(self.codec)

    def escaped_in_json(self, text: str) -> str:
        """Escape the strings of a JSON text like :meth:`escaped`."""
        return text if self.codec is None else text.encode(self.codec, _ESCAPED_IN_JSON).decode(self.codec)

    def why_refused(self, text: str) -> str | None:
        """Return the end of an error message if the text cannot be stored; otherwise ``None``."""
        if (character := self.lacking(text)) is None:
            return None
        return (
            f"contains {character!r} (U+{ord(character):04X}), which the database cannot store: its encoding is "
            f"{self.name}"
        )


UTF_8 = TextEncoding()


@cache
def encoding_named(name: str, codec: str) -> TextEncoding:
    """Return the encoding with this name. If Python has no such codec, it is assumed that every text can be stored."""
    if codec != UTF8MB3:
        try:
            codecs.lookup(codec)
        except LookupError:
            return UTF_8
    return TextEncoding(name, codec)


def _escape_in_json(error: UnicodeError) -> tuple[str | bytes, int]:
    replaced, end = codecs.backslashreplace_errors(error)
    return str(replaced).replace("\\", "\\\\"), end


codecs.register_error(_ESCAPED_IN_JSON, _escape_in_json)
