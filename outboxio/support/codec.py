"""JSON in and out. A stored value is a JSON object without NaN, not too deep, and readable by the database."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from enum import Enum
from typing import Any, TypeGuard, TypeVar, cast

import msgspec

from outboxio.errors import InvalidEvent
from outboxio.support.text import briefly

DEEPEST = 31
"""The largest depth of objects and lists in stored JSON, on every database: MariaDB takes 32 levels, and counts the
innermost value as a level; MySQL takes 100. So rows can move between databases, and the stack of no reader overflows.
"""

_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NEITHER_BRACKETS_NOR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))

_encode = msgspec.json.Encoder().encode
_decode_column = msgspec.json.Decoder(dict[str, Any] | str | None).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_names = msgspec.json.Decoder(tuple[str, ...] | str).decode


Encode = Callable[[Any], bytes]
Check = Callable[[bytes, str], bytes]
"""``check(document, subject)``: the document in a spelling whose numbers the database keeps. Raises
:class:`InvalidEvent` for a number that the database would change."""
S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


def encode_object(
    value: object,
    subject: str,
    *,
    stores_nul: bool,
    check: Check | None = None,
    encode: Encode = _encode,
    nan_is_null: bool = True,
) -> str:
    """``value`` as the text of a JSON object. Raises :class:`InvalidEvent` with the place of a value that is refused.

    ``stores_nul``: ``True`` if the database keeps NUL inside JSON strings. ``check``: of the numbers; ``None`` if the
    database keeps all numbers. ``encode`` makes the JSON; ``nan_is_null``: ``True`` if it writes NaN and infinities as
    null.
    """
    if isinstance(value, msgspec.Raw):
        value = decode_given(bytes(value), subject)  # the encoder would copy the bytes unread
    try:
        encoded = encode(value)
    except UnicodeEncodeError as error:
        told = f"a string contains a lone surrogate, which is no Unicode text: {error}{_place(value, encode)}"
        raise InvalidEvent(subject, told) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidEvent(subject, f"cannot be encoded as JSON: {error}{_place(value, encode)}") from error
    if not encoded.startswith(b"{"):
        reason = f"encodes to {encoded.decode()[:40]}, which is no JSON object"
        raise InvalidEvent(subject, reason, logged="encodes to JSON that is no object")
    if len(encoded) > 2 * DEEPEST and nests_deeper(encoded, DEEPEST):  # so many brackets take so many bytes
        raise InvalidEvent(subject, _TOO_DEEP)
    # Only a text with a null can hide NaN.
    if nan_is_null and b"null" in encoded:
        refuse_leaf(value, subject, _is_not_finite, "is {}, which JSON cannot hold; use None, or a string")
    # An escaped backslash before u0000 looks the same, so the decoded strings are searched.
    if not stores_nul and b"\\u0000" in encoded:
        decoded = msgspec.json.decode(encoded)
        refuse_leaf(decoded, subject, _has_nul, "{} contains NUL (U+0000), which this database cannot store in JSON")
    if check is not None:
        encoded = check(encoded, subject)
    return encoded.decode()


def decode_given(text: str | bytes | bytearray, subject: str) -> object:
    """The value of a JSON text from outside. Raises :class:`InvalidEvent` for text that is no JSON, or too deep.

    A text that is too deep is refused before the decoder could overflow the stack.
    """
    try:
        given = text.encode() if isinstance(text, str) else bytes(text)
        if nests_deeper(given, DEEPEST):
            raise InvalidEvent(subject, _TOO_DEEP)
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidEvent(subject, f"is no JSON: {error}") from error


def nests_deeper(text: bytes, levels: int) -> bool:
    """True if objects and lists of a JSON text are nested deeper than ``levels``.

    Most texts have fewer brackets than ``levels``. Otherwise only the brackets outside of strings are kept, and each
    step removes the innermost pairs, which lowers the depth by 1. The steps are a few passes in C over the text.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # escaped quotes end no string
    marks = text.translate(_AS_BRACKETS, _NEITHER_BRACKETS_NOR_QUOTES).replace(b'""', b"")
    if b'"' in marks:
        marks = b"".join(marks.split(b'"')[::2])  # without the brackets inside of strings
    for _ in range(levels):
        if not marks:
            return False
        marks = marks.replace(b"[]", b"")
    return bool(marks)


def decode_object(document: bytes | msgspec.Raw) -> dict[str, Any]:
    """A JSON object, also if the document is a JSON string with an object in it; ``{}`` for ``null``."""
    decoded = _decode_column(document)
    return _decode_object(decoded) if isinstance(decoded, str) else decoded or {}


def decode_names(document: str) -> tuple[str, ...]:
    """A JSON list of names, also if the document is a JSON string with the list in it; ``()`` for any other document.

    A malformed list counts as empty, so that the row of one process stops no other process.
    """
    try:
        decoded = _decode_names(document)
        decoded = _decode_names(decoded) if isinstance(decoded, str) else decoded
    except (msgspec.DecodeError, UnicodeError):
        return ()
    return () if isinstance(decoded, str) else decoded


def decode_exactly(document: bytes | msgspec.Raw, type: type[T]) -> T:
    """A JSON object as a value of ``type``, also if the document is a JSON string with an object in it.

    A number with a point is a ``Decimal`` where the type asks for no float.
    """
    text = bytes(document)
    if text.lstrip().startswith(b'"'):
        text = msgspec.json.decode(text, type=str).encode()
    return msgspec.json.Decoder(type, float_hook=Decimal).decode(b"{}" if text.strip() == b"null" else text)


_TOO_DEEP = (
    f"has more than {DEEPEST} objects and lists within one another, which not every database can store in JSON; store "
    "what is deeper as text"
)


def not_finite_in(value: object) -> str:
    """The place of the first NaN or infinity, in msgspec's spelling; ``""`` without one."""
    return _spelled(next((path for path, leaf in leaves_of(value) if _is_not_finite(leaf)), ""))


def _place(value: object, encode: Encode) -> str:
    """The place of the first leaf that cannot be encoded, in msgspec's spelling; ``""`` for ``value`` itself."""
    try:
        return _spelled(next((path for path, leaf in leaves_of(value) if _fails(path, leaf, encode)), ""))
    except RecursionError:  # the value contains itself
        return ""


def _spelled(path: str) -> str:
    return f" - at `{path.lstrip('.')}`" if path else ""


class _KeyPath(str):
    """The path of a mapping's key, which JSON holds as text."""


def _fails(path: str, leaf: object, encode: Encode) -> bool:
    try:
        encode({leaf: None} if isinstance(path, _KeyPath) else leaf)
    except Exception:
        return True
    return False


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_nul(value: object) -> bool:
    return isinstance(value, str) and "\0" in value


def refuse_leaf(value: object, subject: str, is_bad: Callable[[object], bool], reason: str) -> None:
    """Raise :class:`InvalidEvent` with the place of the first leaf below ``value`` that ``is_bad`` finds."""
    for path, leaf in leaves_of(value):
        if is_bad(leaf):
            place = path.lstrip(".") or "the value"
            shown = str(leaf)[:80] if isinstance(leaf, Decimal) else briefly(leaf)
            raise InvalidEvent(subject, f"{place} {reason.format(shown)}", logged="has a value that cannot be stored")


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf below ``value``, after the path to the leaf; keys of mappings count as leaves."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from leaves_of(getattr(value, field), f"{path}.{field}")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield _KeyPath(f"{path} key"), key
            yield from leaves_of(item, f"{path}.{key}")
    elif isinstance(value, str | bytes | bytearray):
        yield path, value
    elif isinstance(value, Sequence | Set):
        for index, item in enumerate(cast("Iterable[object]", value)):
            yield from leaves_of(item, f"{path}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        for one in dataclasses.fields(value):
            yield from leaves_of(getattr(value, one.name, None), f"{path}.{one.name}")
    elif hasattr(value, "__attrs_attrs__"):
        for attribute in value.__attrs_attrs__:
            yield from leaves_of(getattr(value, attribute.name, None), f"{path}.{attribute.name}")
    elif hasattr(value, "__pydantic_extra__"):
        items: dict[str, Any] = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        for name, item in items.items():
            yield from leaves_of(item, f"{path}.{name}")
    else:
        yield path, value.value if isinstance(value, Enum) else value


# A tool of an application may have written a document of any shape. A type checker knows the members of a value that
# these functions have checked as ``object``; after ``isinstance(value, dict)`` every use of a member would be accepted.


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """True for a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """True for a JSON list."""
    return isinstance(value, list)


# --- structs --------------------------------------------------------------------------------------


def made_from(source: object, cls: type[S], **fields: Any) -> S:
    """A struct of ``cls`` with ``fields``; its other fields are the attributes of ``source`` with the same names.

    Example::

        made_from(event, EventRow, states={"DEAD": 1})  # an EventRow has the fields of the event, and states
    """
    taken = {name: getattr(source, name) for name in cls.__struct_fields__ if name not in fields}
    return cls(**taken, **fields)
