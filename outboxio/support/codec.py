"""Encoding and decoding of JSON. A stored value is an object without NaN that every database can store."""

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

MAX_DEPTH = 31
"""The maximum nesting depth of stored JSON on every database, so that rows can be moved between databases. MariaDB
allows 32 levels, including the innermost value; MySQL allows 100. It also protects readers from stack overflows.
"""

_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NEITHER_BRACKETS_NOR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))

_encode = msgspec.json.Encoder().encode
_decode_column = msgspec.json.Decoder(dict[str, Any] | str | None).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_names = msgspec.json.Decoder(tuple[str, ...] | str).decode


Encode = Callable[[Any], bytes]
Check = Callable[[bytes, str], bytes]
"""``check(document, subject)``: returns the document with numbers in a form that the database stores exactly. Raises
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
    """Return ``value`` as the text of a JSON object. Raises :class:`InvalidEvent` with the path of an invalid value.

    ``stores_nul``: ``True`` if the database can store NUL in JSON strings. ``check``: checks the numbers; ``None`` if
    the database stores all numbers exactly. ``encode`` makes the JSON; ``nan_is_null``: ``True`` if it writes NaN and
    infinities as null.
    """
    if isinstance(value, msgspec.Raw):
        value = decode_document(bytes(value), subject)  # the encoder would copy the bytes without a check
    try:
        encoded = encode(value)
    except UnicodeEncodeError as error:
        reason = f"a string contains a lone surrogate, which is not valid Unicode: {error}{_location(value, encode)}"
        raise InvalidEvent(subject, reason) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidEvent(subject, f"cannot be encoded as JSON: {error}{_location(value, encode)}") from error
    if not encoded.startswith(b"{"):
        reason = f"encodes to {encoded.decode()[:40]}, which is not a JSON object"
        raise InvalidEvent(subject, reason, logged="encodes to JSON that is not an object")
    if len(encoded) > 2 * MAX_DEPTH and nests_deeper(encoded, MAX_DEPTH):  # a shorter text cannot be that deep
        raise InvalidEvent(subject, _TOO_DEEP)
    # NaN is encoded as null.
    if nan_is_null and b"null" in encoded:
        refuse_leaf(value, subject, _is_not_finite, "is {}, which JSON cannot hold; use None, or a string")
    # An escaped backslash before u0000 looks the same, so the decoded strings are searched.
    if not stores_nul and b"\\u0000" in encoded:
        decoded = msgspec.json.decode(encoded)
        refuse_leaf(decoded, subject, _has_nul, "{} contains NUL (U+0000), which this database cannot store in JSON")
    if check is not None:
        encoded = check(encoded, subject)
    return encoded.decode()


def decode_document(text: str | bytes | bytearray, subject: str) -> object:
    """Decode an untrusted JSON text. Raises :class:`InvalidEvent` if it is not valid JSON, or nested too deeply.

    Text that is nested too deeply is rejected before the decoder can overflow the stack.
    """
    try:
        document = text.encode() if isinstance(text, str) else bytes(text)
        if nests_deeper(document, MAX_DEPTH):
            raise InvalidEvent(subject, _TOO_DEEP)
        return msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidEvent(subject, f"is not valid JSON: {error}") from error


def nests_deeper(text: bytes, levels: int) -> bool:
    """Return True if objects and lists of a JSON text are nested deeper than ``levels``.

    Most texts have fewer brackets than ``levels``. Otherwise only brackets outside of strings are kept, and each pass
    removes the innermost pairs, which reduces the depth by 1. The passes run in C.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # escaped quotes do not end a string
    marks = text.translate(_AS_BRACKETS, _NEITHER_BRACKETS_NOR_QUOTES).replace(b'""', b"")
    if b'"' in marks:
        marks = b"".join(marks.split(b'"')[::2])  # without the brackets inside of strings
    for _ in range(levels):
        if not marks:
            return False
        marks = marks.replace(b"[]", b"")
    return bool(marks)


def decode_object(document: bytes | msgspec.Raw) -> dict[str, Any]:
    """Decode a JSON object, or a JSON string that contains one; ``{}`` for ``null``."""
    decoded = _decode_column(document)
    return _decode_object(decoded) if isinstance(decoded, str) else decoded or {}


def decode_names(document: str) -> tuple[str, ...]:
    """Decode a JSON list of names, or a JSON string that contains one; ``()`` for any other document.

    A malformed list counts as empty, so that a row of one process cannot stop others.
    """
    try:
        decoded = _decode_names(document)
        decoded = _decode_names(decoded) if isinstance(decoded, str) else decoded
    except (msgspec.DecodeError, UnicodeError):
        return ()
    return () if isinstance(decoded, str) else decoded


def decode_exactly(document: bytes | msgspec.Raw, type: type[T]) -> T:
    """Decode a JSON object, or a JSON string that contains one, as a value of ``type``.

    A number with a decimal point becomes a ``Decimal`` unless the type requires a float.
    """
    text = bytes(document)
    if text.lstrip().startswith(b'"'):
        text = msgspec.json.decode(text, type=str).encode()
    return msgspec.json.Decoder(type, float_hook=Decimal).decode(b"{}" if text.strip() == b"null" else text)


_TOO_DEEP = (
    f"is nested deeper than {MAX_DEPTH} objects and lists, which not every database can store as JSON; store the "
    "deeper levels as text"
)


def not_finite_in(value: object) -> str:
    """Return the path of the first NaN or infinity, in msgspec's format; ``""`` if there is none."""
    return _spelled(next((path for path, leaf in leaves_of(value) if _is_not_finite(leaf)), ""))


def _location(value: object, encode: Encode) -> str:
    """Return the path of the first leaf that cannot be encoded, in msgspec's format; ``""`` for ``value`` itself."""
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
    """Raise :class:`InvalidEvent` with the path of the first leaf of ``value`` for which ``is_bad`` is true."""
    for path, leaf in leaves_of(value):
        if is_bad(leaf):
            where = path.lstrip(".") or "the value"
            shown = str(leaf)[:80] if isinstance(leaf, Decimal) else briefly(leaf)
            raise InvalidEvent(subject, f"{where} {reason.format(shown)}", logged="has a value that cannot be stored")


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and value of every leaf of ``value``. Keys of mappings are leaves too."""
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


# Other tools may have written documents of any shape. With these functions, type checkers know that members are
# ``object``; after ``isinstance(value, dict)`` they would accept any use of a member.


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Return True for a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Return True for a JSON list."""
    return isinstance(value, list)


# --- structs --------------------------------------------------------------------------------------


def made_from(source: object, cls: type[S], **fields: Any) -> S:
    """Return a struct of ``cls`` with ``fields``; all other fields are copied from attributes of ``source``.

    Example::

        made_from(event, EventRow, states={"DEAD": 1})  # an EventRow has the fields of the event, and states
    """
    taken = {name: getattr(source, name) for name in cls.__struct_fields__ if name not in fields}
    return cls(**taken, **fields)
