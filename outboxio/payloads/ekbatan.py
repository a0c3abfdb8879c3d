"""The JSON of Ekbatan, for event classes with ``json_style="ekbatan"``.

Keys are camelCase, decimals are numbers with all of their digits, enums are written by name. msgspec writes and reads
enums by value. So a document of a class with enums is translated: the parts of the document at which the class has an
enum change from value to name, or back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from typing import Any, cast

import msgspec
from msgspec import inspect

from outboxio.errors import InvalidEvent
from outboxio.support.codec import Check, encode_object

STYLE = "ekbatan"

_encode = msgspec.json.Encoder(decimal_format="number").encode
_decode: Callable[[str | bytes], Any] = msgspec.json.Decoder(float_hook=Decimal).decode

Change = Callable[[type[Enum], Any], Any]
"""Changes the value of an enum to the name of the member, or back."""


def rename_of(json_style: str, name: str) -> str:
    """The spelling of the keys of an event class. :class:`InvalidEvent` for a style that does not exist."""
    if json_style != STYLE:
        raise InvalidEvent(f"json_style of {name}", f"{json_style!r} is no style; expected {STYLE!r}, or leave it out")
    return "camel"


def has_style(cls: type) -> bool:
    """True if objects of a class are stored as Ekbatan stores them."""
    return getattr(cls, "__json_style__", None) == STYLE


def with_model(payload: str, model_id: str | None, model_type: str | None) -> str:
    """The payload with ``modelId`` and ``modelName`` first, unless the class has fields of these names."""
    named = {"modelId": model_id, "modelName": model_type}
    known = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    added = {key: value for key, value in named.items() if key not in known and value is not None}
    if not added:
        return payload
    first = msgspec.json.encode(added).decode()
    return f"{first[:-1]},{payload[1:]}" if known else first


class EkbatanCodec:
    """Encodes and decodes the objects of a struct class. Raises :class:`NameError` for a type that cannot be found."""

    def __init__(self, cls: type) -> None:
        self._info = inspect.type_info(cls)
        self._decode: Callable[[Any], Any] = msgspec.json.Decoder(cls).decode
        self._has_enums = _has_enum(self._info, set())

    def encode(self, value: object, subject: str, *, stores_nul: bool, check: Check | None = None) -> str:
        """As :func:`~outboxio.support.codec.encode_object`."""
        return encode_object(value, subject, stores_nul=stores_nul, check=check, encode=self._encoded)

    def _encoded(self, value: Any) -> bytes:
        encoded = _encode(value)
        if self._has_enums and isinstance(value, msgspec.Struct):
            return _encode(_translated(_decode(encoded), self._info, _name_of))
        return encoded

    def decode(self, payload: Any) -> Any:
        """The object of a JSON text. Raises ``msgspec.ValidationError`` for a value that does not fit."""
        if self._has_enums:
            text = payload if isinstance(payload, str | bytes) else bytes(payload)
            payload = _encode(_translated(_decode(text), self._info, _value_of))
        return self._decode(payload)


def _name_of(enum: type[Enum], value: Any) -> str:
    return enum(int(value) if isinstance(value, Decimal) else value).name


def _value_of(enum: type[Enum], name: Any) -> Any:
    try:
        return enum[name].value
    except KeyError:
        raise msgspec.ValidationError(f"Invalid enum name, expected one of {', '.join(enum.__members__)}") from None


def _translated(document: Any, info: Any, change: Change) -> Any:
    """The document with the enums of a type changed."""
    if isinstance(info, inspect.Metadata):
        return _translated(document, info.type, change)
    if isinstance(info, inspect.UnionType):
        for member in info.types:
            if _fits(document, member):
                return _translated(document, member, change)
        return document
    if isinstance(info, inspect.EnumType):
        return change(info.cls, document) if isinstance(document, str | int) else document
    if isinstance(document, dict):
        return _translated_object(cast("dict[str, Any]", document), info, change)
    if isinstance(document, list):
        items = cast("list[object]", document)
        if isinstance(info, inspect.TupleType):
            pairs = zip(items, info.item_types, strict=False)
            return [_translated(item, of_item, change) for item, of_item in pairs]
        item_type = getattr(info, "item_type", None)
        return items if item_type is None else [_translated(item, item_type, change) for item in items]
    return document


def _translated_object(document: dict[str, Any], info: Any, change: Change) -> dict[str, Any]:
    if isinstance(info, inspect.DictType):
        return {
            _translated(key, info.key_type, change): _translated(value, info.value_type, change)
            for key, value in document.items()
        }
    fields = {field.encode_name: field.type for field in getattr(info, "fields", ())}
    return {key: _translated(value, fields[key], change) if key in fields else value for key, value in document.items()}


def _fits(document: Any, info: Any) -> bool:
    """True if the JSON value may be of this member of a union."""
    if isinstance(document, dict):
        return isinstance(info, inspect.DictType) or hasattr(info, "fields")
    if isinstance(document, list):
        return hasattr(info, "item_type") or hasattr(info, "item_types")
    return isinstance(info, inspect.EnumType) and isinstance(document, str | int)


def _has_enum(info: Any, seen: set[int]) -> bool:
    """True if a type has an enum in which a name differs from its value."""
    if id(info) in seen:
        return False
    seen.add(id(info))
    if isinstance(info, inspect.EnumType):
        return any(member.name != member.value for member in info.cls)
    return any(_has_enum(part, seen) for part in parts_of(info))


def parts_of(info: Any) -> Iterator[Any]:
    """The types that a type is made of."""
    for field in getattr(info, "fields", ()):
        yield field.type
    for name in ("type", "key_type", "value_type", "item_type"):
        if hasattr(info, name):
            yield getattr(info, name)
    for name in ("types", "item_types"):
        yield from getattr(info, name, ())
