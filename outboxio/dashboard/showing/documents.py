"""The documents of an event, as a page shows them: as they are stored, and never more than 64 KB."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec
from msgspec import Raw, Struct

from outboxio.dashboard.asked import Asked

MOST_SHOWN = 65_536  # characters of a document on a page
_MOST_INDENTED = 262_144  # characters; a longer text is shown as it is stored


class Document(Struct, frozen=True, kw_only=True):
    """A JSON document, such as a payload."""

    value: Raw | None
    """The document, with all digits of its numbers. ``None`` if the document is larger than 64 KB, or no valid JSON."""
    text: str | None
    """The beginning of the text, if there is no value."""
    characters: int
    """The length of the whole text."""

    @property
    def shown(self) -> str:
        """The text for people, at most 64 KB."""
        return _indented(bytes(self.value).decode()) if self.value is not None else self.text or ""

    @property
    def is_cut(self) -> bool:
        """True if the page shows a part of the text."""
        return self.characters > MOST_SHOWN

    @property
    def is_empty(self) -> bool:
        """True for ``{}`` and ``null``."""
        return self.value is not None and bytes(self.value).strip() in (b"{}", b"null")


def document(text: str) -> Document:
    """The document of a JSON text."""
    if len(text) > MOST_SHOWN:
        return Document(value=None, text=text[:MOST_SHOWN], characters=len(text))
    try:
        value = msgspec.json.decode(text, type=Raw).copy()
        msgspec.json.format(value)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return Document(value=None, text=text, characters=len(text))
    return Document(value=value, text=None, characters=len(text))


async def texts_of(asked: Asked, event_id: UUID, shard: str) -> Mapping[str, str]:
    """The redacted texts of the documents of an event; empty without the right to read payloads."""
    return await asked.admin.documents(event_id, shard=shard) if asked.access.may("payloads") else {}


async def documents_of(asked: Asked, event_id: UUID, shard: str) -> Mapping[str, Document]:
    """The documents of an event by name; empty without the right to read payloads."""
    return {name: document(text) for name, text in (await texts_of(asked, event_id, shard)).items()}


def _indented(text: str) -> str:
    try:
        return msgspec.json.format(text, indent=2) if len(text) <= _MOST_INDENTED else text
    except (msgspec.DecodeError, RecursionError):
        return text
