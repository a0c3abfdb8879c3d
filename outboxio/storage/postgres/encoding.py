"""The encodings of PostgreSQL. No driver is imported."""

from __future__ import annotations

from outboxio.support.text import UTF_8, TextEncoding, encoding_named

_CODECS = {"KOI8R": "koi8-r", "KOI8U": "koi8-u"}
"""The codecs of Python that have a different name than the encoding of PostgreSQL."""


def encoding_called(name: str | None) -> TextEncoding:
    """The encoding with this name in ``server_encoding`` or ``client_encoding``."""
    if name is None or name in ("UTF8", "SQL_ASCII"):  # SQL_ASCII stores the bytes of the client as they are
        return UTF_8
    return encoding_named(name, _CODECS.get(name, name.replace("WIN", "cp")))
