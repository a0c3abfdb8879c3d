"""The text with which a list goes on: the place that was reached on each shard.

The text is opaque, and is for the same filter only.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.model.operating.groups import Filter
from outboxio.support.text import briefly

P = TypeVar("P")


class _Written(Struct, frozen=True, array_like=True):
    of: str
    places: Mapping[str, Any]


class Cursor(Struct, Generic[P], frozen=True):
    """The places of a list. A shard without an entry has been read to the end; ``None`` is the beginning."""

    places: Mapping[str, P | None]

    def text(self, filter: Filter) -> str | None:
        """The text for a page; ``None`` if all shards were read to the end."""
        if not self.places:
            return None
        written = _Written(_digest(filter), self.places)
        return base64.urlsafe_b64encode(msgspec.json.encode(written)).decode().rstrip("=")


def cursor_of(
    text: str, filter: Filter, kind: type[P], is_place: Callable[[P], bool] = lambda place: True
) -> Cursor[P]:
    """The places in a text of :meth:`Cursor.text`. Raises :class:`ConfigurationError` for any other text.

    A user may change the text. ``is_place``: False for a place that no list has, at which a database would fail.
    """
    try:
        decoded = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)
        written = msgspec.json.decode(decoded, type=_Written)
        places = {
            shard: None if place is None else msgspec.convert(place, type=kind)
            for shard, place in written.places.items()
        }
        if not all(place is None or is_place(place) for place in places.values()):
            raise ValueError(text)
    except (ValueError, msgspec.MsgspecError):
        raise no_cursor(text) from None
    if written.of != _digest(filter):
        raise ConfigurationError(
            "after is of a list with a different filter; give the filter of that list again, or leave after out"
        )
    return Cursor(places)


def no_cursor(text: object) -> ConfigurationError:
    """The error for a text that no list has made."""
    return ConfigurationError(
        f"after is {briefly(text)}; expected the text in page.next, or the id of the last notification"
    )


def _digest(filter: Filter) -> str:
    return sha256(msgspec.json.encode(filter)).hexdigest()[:8]
