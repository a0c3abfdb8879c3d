"""Texts for errors, logs and terminals: values, misspelt names, URLs without passwords. Pure functions.

And the characters that a database can store: an encoding may have only a few hundred.
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

_LONGEST = 80
_CUT = " (\N{HORIZONTAL ELLIPSIS})"  # a sentence may go on behind it, which "..." would make hard to see
_MOST_LISTED = 12
_ALIKE = 0.8

# All characters between the scheme and the last @ of a word, because a password may contain unescaped characters.
_USERINFO = re.compile(r"://[^\s'\"]*@")
_OPTION = re.compile(r"([?&](?:ssl)?password=)[^\s&'\"]*", re.IGNORECASE)


def briefly(value: object) -> str:
    """The ``repr`` of a value for an error message: a single line of at most 80 characters. Never raises."""
    text = " ".join(spelled(value).splitlines())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def cut_at_word(text: str, longest: int) -> str:
    """The beginning of a text, up to the end of a word: ``the server closed the connection for (…)``."""
    if len(text) <= longest:
        return text
    beginning, space, _ = text[: longest - len(_CUT) + 1].rpartition(" ")
    # A word may be longer than that, such as a URL.
    kept = beginning if space and len(beginning) > longest // 2 else text[: longest - len(_CUT)]
    return f"{kept.rstrip(' .,:;')}{_CUT}"


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


def visible_json(text: str) -> str:
    """The same JSON document, for a terminal: characters that are not printable are written as ``\\uXXXX``."""
    return "\n".join(map(_visible_json_line, text.split("\n")))


def _visible_json_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


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


# --- encodings -------------------------------------------------------------------------------

UTF8MB3 = "utf8mb3"
"""In place of a codec: UTF-8 of at most three bytes. Python has no such codec."""

_ESCAPED_IN_JSON = "outboxio.escaped_in_json"


class TextEncoding(Struct, frozen=True):
    """The encoding of a database."""

    name: str = "UTF-8"
    """The name of the encoding, as the database has it."""
    codec: str | None = None
    """The codec of Python with the same characters, or ``UTF8MB3``; ``None`` if every text can be stored."""

    def lacking(self, text: str) -> str | None:
        """The first character that the database cannot store."""
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
        """The text with an escape sequence in place of each character that the database cannot store."""
        return text if self.codec is None else text.encode(self.codec, "backslashreplace").decode(self.codec)

    def escaped_in_json(self, text: str) -> str:
        """The same for a JSON text, whose strings get the escape sequences of :meth:`escaped`."""
        return text if self.codec is None else text.encode(self.codec, _ESCAPED_IN_JSON).decode(self.codec)

    def why_refused(self, text: str) -> str | None:
        """The end of an error message about a text that cannot be stored; ``None`` for a text that can be stored."""
        if (character := self.lacking(text)) is None:
            return None
        return (
            f"contains {character!r} (U+{ord(character):04X}), which the database cannot store: its encoding is "
            f"{self.name}"
        )


UTF_8 = TextEncoding()


@cache
def encoding_named(name: str, codec: str) -> TextEncoding:
    """The encoding with this name. Every text can be stored if Python has no such codec, as far as is known here."""
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
