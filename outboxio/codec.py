"""JSON in and out: what is stored must be an object, whole, and readable by the database."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import msgspec

from outboxio.errors import InvalidEvent

_encode = msgspec.json.Encoder().encode
_decode_column = msgspec.json.Decoder(dict[str, Any] | str | None).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def encode_object(value: object, subject: str, *, stores_nul: bool) -> str:
    """``value`` as the text of a JSON object; :class:`InvalidEvent` names what cannot be stored, and where.

    ``stores_nul`` says whether the database keeps NUL inside JSON strings.
    """
    try:
        encoded = _encode(value)
    except UnicodeEncodeError as error:
        raise InvalidEvent(subject, f"a string contains a lone surrogate, which is no Unicode text: {error}") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidEvent(subject, f"cannot be encoded as JSON: {error}") from error
    if not encoded.startswith(b"{"):
        raise InvalidEvent(subject, f"encodes to {encoded.decode()[:40]}, which is no JSON object")
    # msgspec writes NaN and infinities as null, so only a text with a null in it can hide one.
    if b"null" in encoded:
        _refuse(value, subject, _is_not_finite, "is {!r}, which JSON cannot hold; use None, or a string")
    # An escaped backslash before u0000 looks the same, so the strings themselves are asked.
    if not stores_nul and b"\\u0000" in encoded:
        decoded = msgspec.json.decode(encoded)
        _refuse(decoded, subject, _has_nul, "{!r} contains NUL (U+0000), which this database cannot store in JSON")
    return encoded.decode()


def decode_object(document: bytes | msgspec.Raw) -> dict[str, Any]:
    """A JSON object, or one that is written as text within JSON; an empty one where there is ``null``."""
    decoded = _decode_column(document)
    return _decode_object(decoded) if isinstance(decoded, str) else decoded or {}


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_nul(value: object) -> bool:
    return isinstance(value, str) and "\0" in value


def _refuse(value: object, subject: str, is_bad: Any, reason: str) -> None:
    for path, leaf in _leaves(value, ""):
        if is_bad(leaf):
            raise InvalidEvent(subject, f"{path.lstrip('.') or 'the value'} {reason.format(leaf)}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, object]]:
    """Every leaf below ``value`` with the path that leads to it; keys of mappings count as leaves."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from _leaves(getattr(value, field), f"{path}.{field}")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield f"{path} key", key
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, str | bytes | bytearray):
        yield path, value
    elif isinstance(value, Sequence | Set):
        for index, item in enumerate(cast("Iterable[object]", value)):
            yield from _leaves(item, f"{path}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        for field in value.__dataclass_fields__:
            yield from _leaves(getattr(value, field), f"{path}.{field}")
    elif hasattr(value, "__attrs_attrs__"):
        for attribute in value.__attrs_attrs__:
            yield from _leaves(getattr(value, attribute.name), f"{path}.{attribute.name}")
    else:
        yield path, getattr(value, "value", value)
